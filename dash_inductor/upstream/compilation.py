"""PyTorch's objects for the compile in progress: its id, contexts, counters and structured trace.  Imports Dynamo."""

from torch._dynamo.utils import counters
from torch._guards import CompileContext, TracingContext
from torch._logging._internal import trace_log, trace_structured

__all__ = ["CompileContext", "TracingContext", "counters", "trace_log", "trace_structured"]
