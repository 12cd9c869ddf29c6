"""The warp-specialised attention forward for Hopper (sm_90), in Gluon.

Roles, one file each: `producer` (TMA loads, the work list) and `consumer` (the two matmuls of every `steps` and the
softmax between them, with `dropout` for dropout, `listed` for masks that are data and `seen` for the dense ones among
them); `tile_work` says which tiles there are, `entry` puts the roles together, `prepare` runs before it, `build`
compiles and `launch` is the host side.
"""
