"""The phases of a training step in recordings and the guard, in the order in which they occur."""

from __future__ import annotations

INITIAL = "initial parameter"
INPUT = "input"
ACTIVATION = "activation"
ACTIVATION_GRADIENT = "gradient of activation"
ATTENTION_GRADIENT = "gradient of attention"
LOCAL_GRADIENT = "local gradient"
GRADIENT = "gradient"
PARAMETER = "parameter"
OPTIMIZER_STATE = "optimizer state"
BUFFER = "buffer"
STATE = "state"
"""What a step begins with besides tensors: generators, settings of optimizers, the loss scale, positions in the data.

It is in no stage, because it changes no bit by itself.
"""
LOSS = "loss"
"""The number that a step differentiates; in no stage, because it decides nothing: gradients do."""

STAGES = {
    INITIAL: 0,
    INPUT: 1,
    ACTIVATION: 1,
    ACTIVATION_GRADIENT: 1,
    ATTENTION_GRADIENT: 1,
    LOCAL_GRADIENT: 1,
    GRADIENT: 2,
    PARAMETER: 3,
    OPTIMIZER_STATE: 3,
    BUFFER: 3,
}
"""The stage of the step to which each phase belongs.

Within a stage, the phases of one rank are in the order of observation.  Between stages 1 and 2 ranks exchange
gradients, so everything of stage 1, on any rank, precedes everything of stage 2.
"""
