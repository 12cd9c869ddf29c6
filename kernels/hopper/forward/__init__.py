"""The warp-specialised attention forward for Hopper (sm_90), in Gluon.

Each warp role has a module: `producer` (TMA loads, work ids) and `consumer` (the two matmuls of each iteration in
`steps` and the softmax between them; `dropout`, `documents` for packed operators, `listed` for other masks that are
data, and `seen` for dense masks).
`tile_work` defines the work list of q tiles, `entry` is the main kernel, `prepare` runs before it, `build` compiles,
`launch` is the host side.
"""
