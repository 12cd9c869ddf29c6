"""The warp-specialised attention backward for Hopper (sm_90), in Gluon.

Roles, one file each: `producer` (TMA loads), `consumer` (the five matmuls), `reducer` (ordered adds to dq); `entry`
puts them together, `prepare` and `finish` run before and after it, `launch` is the host side.
"""
