"""The phases of a training step that recordings and the guard know, in the order in which the step makes them."""

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
"""Phases with the stage of the step that they belong to.

Within a stage, what one rank observes is in the order of its observation.  Between stage 1 and stage 2 ranks exchange
gradients, so that everything of stage 1, of whatever rank, comes before everything of stage 2.
"""
