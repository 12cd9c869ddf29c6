"""`Reason`: the complete list of reasons for which an attention is not replaced."""

from __future__ import annotations

from enum import Enum


class Reason(Enum):
    """The reason why an attention is not replaced; the value is the name used in records, logs and traces.

    Attributes:
        explanation: one sentence for users.
        advice: how to make the attention replaceable, or why nothing has to be done.  `docs/troubleshooting.md` and the
            reports of `dash_inductor.explain` show it; code is in backticks.
    """

    explanation: str
    advice: str

    def __new__(cls, value: str, explanation: str = "", advice: str = "") -> Reason:
        member = object.__new__(cls)
        member._value_ = value
        member.explanation = explanation
        member.advice = advice
        return member

    CPU_OFF = (
        "cpu_off",
        "PyTorch's CPU kernel is deterministic already; cpu='reference' replaces it.",
        'Usually nothing, because PyTorch\'s CPU kernel is deterministic. For tests, set `config.cpu = "reference"`.',
    )
    DEVICE = (
        "device",
        "Only CUDA devices (not ROCm) and the CPU are supported.",
        "Use a CUDA device or the CPU.",
    )
    UNSUPPORTED_OP = (
        "unsupported_op",
        "This operator of attention, or one between the products of attention by hand, is not one that is replaced.",
        (
            "`detail` names the operator, or the argument that is not supported: choose another SDPA backend, or leave "
            "that argument away. Of attention by hand, it names the node that stands in the way."
        ),
    )
    MATH_PATH = (
        "math_path",
        "PyTorch computes this call by its math implementation, without a fused operator.",
        (
            "`detail` says which condition of PyTorch's fused operators the call does not meet, and with which tensors "
            "the program made it. Such calls are replaced as attention by hand is, but for float64 and for masks "
            "that broadcast along some of several leading dimensions. A program that uses "
            "`sdpa_kernel(SDPBackend.MATH)` has asked for it."
        ),
    )
    VARLEN = (
        "varlen",
        "Packed attention is replaced where queries and keys have the same documents; the detail says what differs.",
        (
            "Pass one tensor as `cu_seq_q` and `cu_seq_k` (of flash-attn, a view of `cu_seqlens_q` as `cu_seqlens_k`), "
            "of int32 or int64 [documents + 1] and on the device of query, with as many tokens of query as of key, and "
            "no dropout, `seqused_k` or `block_table`. Its first number must be 0: tokens before the first document "
            "have no row, and no results. Nested tensors in float32 call another operator, which is not replaced: use "
            "float16 or bfloat16. Or let the model call SDPA and pass `position_ids` that restart with every document, "
            "without a cache: these packed documents are replaced too."
        ),
    )
    FLEX_ATTENTION = (
        "flex_attention",
        "FlexAttention is replaced where the functions that it calls can be read; the detail says what cannot be.",
        (
            "`detail` quotes the function. A `score_mod` is read that multiplies the score by numbers of its head "
            "and of its query or key, bounds it (`c * tanh(score / c)`), then adds what does not depend on it, and "
            "then hides it by minus infinity, or does some of these in this order. What it adds, and a `mask_mod`, "
            "may be any operators on single numbers and reads of single elements of tensors, without random numbers. "
            "What depends on query and key otherwise is computed into memory, if it is not too large. "
            "Do not use the maximum of the scores. A block mask without a `mask_mod` is not replaced, because its "
            "blocks alone say who sees whom: give it a `mask_mod`, or pass no block mask where nothing is hidden."
        ),
    )
    DROPOUT = (
        "dropout",
        (
            "Dropout is replaced only together with its forward, by kernels that have it; the detail says what is "
            "missing."
        ),
        (
            '`detail` says what is missing. Leave `config.forward` at `"auto"`, let nothing else read the forward\'s '
            "random state, and choose an `activation_memory_budget` above 0, which would have the "
            "backward draw other random numbers than the forward. A probability of 1 leaves nothing. Or set "
            "attention dropout to 0."
        ),
    )
    PROBABILITIES_USED = (
        "probabilities_used",
        "The probabilities are used by the program.",
        (
            "The program reads the softmax, or its scores, otherwise than by the product with value; `detail` names "
            "the node. Do not ask for attention weights in training (`output_attentions=False`)."
        ),
    )
    DTYPE = (
        "dtype",
        "Only float16, bfloat16 and float32 are supported, the same for all tensors of a site.",
        "Cast query, key and value to one of the three dtypes: float16, bfloat16 or float32.",
    )
    HEAD_DIM = (
        "head_dim",
        "No kernel for this device and dtype has this head dimension; the detail lists those there are.",
        (
            "There are kernels for head dimensions up to 128 in float32, and up to 512 in 16 bits. With `enable_gqa`, "
            "PyTorch computes 16-bit heads above 256 in float32: repeat key and value instead (`repeat_interleave`)."
        ),
    )
    VALUE_DIM = (
        "value_dim",
        (
            "No kernel for this device and dtype has a head dimension of value that differs so from that of query "
            "and key."
        ),
        "There are kernels for head dimensions up to 128 in float32, and up to 512 in 16 bits; they may differ.",
    )
    SHAPE = (
        "shape",
        "The shapes are not those of [batch, heads, length, head_dim] attention.",
        "Reshape to four dimensions, with a number of query heads that is divisible by the number of kv heads.",
    )
    DYNAMIC_DIMS = (
        "dynamic_dims",
        "Heads, head dimension or scale depend on data or were marked as dynamic: no guard can fix them.",
        (
            "The number of heads, the head dimension and `scale` may change from call to call, but they must not "
            "come out of a tensor (`.item()`), nor be marked by `mark_dynamic`, which allows no guard. Use "
            "`maybe_mark_dynamic` instead. The sizes of a bias must be known to be those of the scores, too."
        ),
    )
    CAUSAL_LENGTHS = (
        "causal_lengths",
        "Causal flash attention is replaced only where query and key lengths are equal.",
        "The operator was called directly. Pass a mask, or equal lengths.",
    )
    BIAS_GRADIENT = (
        "bias_gradient",
        "The attention bias needs a gradient, which no kernel gives.",
        "Detach the bias if you do not need its gradient.",
    )
    MASK_DEPENDS_ON_INPUT = (
        "mask_depends_on_input",
        "Data decide in the mask more than who sees whom, or may hide all keys of a query by a finite value.",
        (
            "`detail` names the node that decides. A mask that hides keys by a finite number, such as "
            "`torch.finfo(...).min`, is not replaced where data decide which: a query whose keys are all hidden would "
            "see all of them alike. Use a bool mask, or minus infinity. A validity of queries can be left out, because "
            "the outputs of such queries are not used."
        ),
    )
    MASK_NOT_A_BAND = (
        "mask_not_a_band",
        "The mask is not a diagonal band, or not proved to be one for every length.",
        (
            "Nothing, if the mask is the intended one. Where `detail` says that a number is added to the scores, use a "
            "bool mask, minus infinity or `torch.finfo(...).min` of the mask's own type for keys that are to be hidden."
        ),
    )
    MASK_UNKNOWN_OP = (
        "mask_unknown_op",
        "The mask is computed by an operation that cannot be read back.",
        "Build the mask from comparisons of positions. Please report the operator that `detail` names.",
    )
    MASK_VALUE_MISMATCH = (
        "mask_value_mismatch",
        "The mask's values are not those of the components that were read back.",
        "Please report it: what was read of the mask failed the check against the mask's real values.",
    )
    MASK_UNSUPPORTED = (
        "mask_unsupported",
        "No kernel for this device reads a mask of this kind.",
        "Please report it: every mask has kernels for every head dimension that has any.",
    )
    FORWARD_FALLBACK = (
        "forward_fallback",
        "A query may be left without keys, and the log-sum-exp of a forward that is not replaced does not tell which.",
        (
            'Leave `config.forward` at `"auto"`, and use no other result of the forward than its output and its '
            "log-sum-exp. `detail` says why the forward is not replaced."
        ),
    )
    FORWARD_OFF = (
        "forward_off",
        "A forward without a backward stays with forward='keep', as all forwards do.",
        'Leave `config.forward` at `"auto"`.',
    )
    FORWARD_RESULTS = (
        "forward_results",
        "A forward without a backward in its graph gives more than its output and its log-sum-exp.",
        (
            "Use no other result of the forward, such as its random state. A region that is compiled by itself "
            "(`torch.compiler.nested_compile_region`) hands it to its backward in this way. `detail` says what is used."
        ),
    )
    LAYOUT = (
        "layout",
        "A result or the log-sum-exp has a memory layout that cannot be produced or read.",
        "Please report the strides in `detail`. Calling `.contiguous()` before SDPA avoids the problem.",
    )
    SCHEDULE_UNSUPPORTED = (
        "schedule_unsupported",
        "The planner has no plan for this site.",
        "`detail` says what the planner does not cover, for example the architecture.",
    )
    COMPILE_FAILED = (
        "compile_failed",
        "A kernel of this site does not compile for this device, or does not fit it.",
        (
            "`detail` quotes the compiler's message, shortened if it is long; the log at level DEBUG has all of it. "
            "Please report it with the GPU and the versions of torch and triton."
        ),
    )
    SKIPPED = (
        "skipped",
        "It runs outside of all graphs, in a function that Dynamo does not trace.",
        (
            "`detail` names the function and the cause, and the record the line that calls it. FlashAttention-4 "
            "(`flash_attn.cute`) cannot be traced, and neither can kernels from the hub whose operators have no shape "
            "functions (`kernels-community/vllm-flash-attn3`): import the functions from "
            "`dash_inductor.integrations.flash_attn` in their place, without `torch.compiler.disable`; in "
            'transformers, use `attn_implementation="dash_inductor"` after `dash_inductor.register()`. Other '
            "functions may need `torch.compiler.disable` no longer."
        ),
    )
    PASSES_OFF = (
        "passes_off",
        "Inductor's settings let no joint-graph pass run, so that nothing is replaced.",
        (
            'Switch on `pattern_matcher` and `use_joint_graph_passes` of `torch._inductor.config`. `mode="lite"` '
            "switches the second one off."
        ),
    )
    INTERNAL_ERROR = (
        "internal_error",
        "Replacing this site failed unexpectedly: please report it.",
        (
            "Please report it with the traceback that the log has at level DEBUG, and with the output of "
            "`dash-inductor doctor -v`. What the record names stays as PyTorch has it."
        ),
    )
