"""The warp-specialised attention backward for Hopper (sm_90), in Gluon.

Roles, one file each: `producer` (TMA loads), `consumer` (the five matmuls), `reducer` (ordered adds to dq), and in a
profiled kernel the stamper (`stamps`).  They walk by `closed_form` under a band, and by `table_walk` where the mask is
data; `dropout` draws random bits.  `entry` puts them together, `prepare` and `finish` run before and after it, `build`
compiles, and `launch` is the host side, with `call_profiles` for profiles.
"""
