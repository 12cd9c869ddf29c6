"""The warp-specialised attention backward for Hopper (sm_90), in Gluon.

Each warp role has a module: `producer` (TMA loads), `consumer` (the five matmuls), `reducer` (ordered adds to dq), and,
in a profiled kernel, the stamper (`stamps`).  The tile schedule comes from `closed_form` under a band and from
`table_tile_schedule` where the mask is data; `dropout` generates random bits.  `entry` is the main kernel, `prepare`
and `finish` run before and after it, `build` compiles, `launch` is the host side, and `call_profiles` its profiling.
"""
