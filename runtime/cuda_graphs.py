"""Forward and backward passes as CUDA graphs: the host launches once what it otherwise launches kernel by kernel.

A graph holds everything that a microbatch does on the device, from the images to the gradients, whatever the strategy:
gathering weights and reducing gradients, too. The rest of a step (augmentation, a teacher, clipping, the optimizer) is
launched as ever. https://docs.pytorch.org/docs/stable/notes/cuda.html#cuda-graphs has the rules.
"""

import contextlib
import dataclasses
from collections.abc import Callable

import torch

# (number of the microbatch, its tensors) -> its part of the step's loss; adds up gradients.
ForwardBackward = Callable[..., torch.Tensor]
# Steps before the recording. DDP times its first ten passes with events of its own, which a graph cannot hold;
# torch.compile, Triton and FP8's delayed scaling are done with what they do once.
WARMUP_STEPS = 11


def stream(*, enabled: bool) -> contextlib.AbstractContextManager:
    """The stream that a run with graphs lives on, from before its model is built: the default one cannot be recorded.

    DDP and autograd remember the stream on which they first saw a parameter, and would fork the recording to it.
    """
    return torch.cuda.stream(torch.cuda.Stream()) if enabled else contextlib.nullcontext()


@dataclasses.dataclass(frozen=True)
class Recording:
    """One graph, and the tensors that its replay reads and writes."""

    graph: torch.cuda.CUDAGraph
    inputs: tuple[torch.Tensor, ...]
    loss: torch.Tensor
    gradients: list[torch.Tensor | None]


class GraphedPass:
    """`forward_backward`, recorded in step 12 and replayed from then on.

    The first, a middle and the last microbatch of a step differ (gradients start, add up, are reduced), so each has a
    graph of its own; they share memory, which is why they must be replayed in the order of their recording. Gradients
    lie at fixed addresses, and are the parameters' again after each replay: zero_grad may set them to None. Random
    numbers go on following torch's generator, as seeded before each call. What autograd does on the host alone (hooks,
    counters) happens in the recording only.
    """

    def __init__(
        self, forward_backward: ForwardBackward, optimizer: torch.optim.Optimizer, *, accumulation: int
    ) -> None:
        self.forward_backward, self.accumulation = forward_backward, accumulation
        self.parameters = [p for group in optimizer.param_groups for p in group["params"]]
        self.recordings: dict[tuple[bool, bool], Recording] = {}
        self.memory = torch.cuda.graph_pool_handle()
        self.steps = 0

    def __call__(self, microbatch: int, *inputs: torch.Tensor) -> torch.Tensor:
        """The microbatch's loss, a tensor that the next call overwrites; adds its gradients to the parameters'."""
        is_first, is_last = microbatch == 0, microbatch == self.accumulation - 1
        self.steps += is_first
        if self.steps <= WARMUP_STEPS:
            return self.forward_backward(microbatch, *inputs)
        recording = self.recordings.get((is_first, is_last))
        if recording is None:
            recording = self.recordings[is_first, is_last] = self._record(microbatch, inputs)
        else:
            for recorded, new in zip(recording.inputs, inputs, strict=True):
                recorded.copy_(new)
        recording.graph.replay()
        for parameter, gradient in zip(self.parameters, recording.gradients, strict=True):
            parameter.grad = gradient
        return recording.loss

    def _record(self, microbatch: int, inputs: tuple[torch.Tensor, ...]) -> Recording:
        inputs = tuple(each.clone() for each in inputs)
        graph = torch.cuda.CUDAGraph()
        # thread_local: the loaders' and NCCL's threads go on using CUDA meanwhile.
        options = {"pool": self.memory, "stream": torch.cuda.current_stream(), "capture_error_mode": "thread_local"}
        with torch.cuda.graph(graph, **options):
            loss = self.forward_backward(microbatch, *inputs)
        return Recording(graph, inputs, loss, [p.grad for p in self.parameters])
