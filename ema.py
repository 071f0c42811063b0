"""The exponential moving average (EMA) of the weights: in FP32, cut over ranks as they are, saved with them."""

from schema import EmaConfig

import contextlib
from collections.abc import Callable, Iterator

import torch

from distributed import to_local


class Ema:
    """average = decay x average + (1 - decay) x weight, once an update."""

    def __init__(self, weights: dict[str, torch.Tensor], cfg: EmaConfig) -> None:
        """Starts at the weights as they are; both stay the same objects from here on.

        Args:
            weights: name -> parameter, sharded or not.
            cfg: whose decay is not None.
        """
        self.cfg = cfg
        self.weights = weights
        self.averages = {name: weight.detach().clone() for name, weight in weights.items()}

    def decay(self, step: int) -> float:
        """Decay of update number `step`, 1 being the first, whose average is the weights themselves.

        Source: timm.utils.ModelEmaV3, whose names the options have; with use_warmup
        1 - (1 + (step - 1) / warmup_gamma) ^ -warmup_power until that reaches `decay`.
        """
        if step <= 1:
            return 0.0
        if not self.cfg.use_warmup:
            return self.cfg.decay
        return min(1 - (1 + (step - 1) / self.cfg.warmup_gamma) ** -self.cfg.warmup_power, self.cfg.decay)

    @torch.no_grad()
    def update(self, step: int) -> None:
        """Take up the weights after update number `step`."""
        torch._foreach_lerp_(*self._local(), 1 - self.decay(step))

    @torch.no_grad()
    def restart(self) -> None:
        """Begin anew at the weights."""
        torch._foreach_copy_(*self._local())

    @contextlib.contextmanager
    def in_model(self, exchanged: Callable[[], None]) -> Iterator[None]:
        """Inside, the model's weights are the averages; afterwards its own, bit for bit.

        Args:
            exchanged: called after each exchange, for strategies that compute with copies of the weights.
        """
        self._exchange()
        exchanged()
        try:
            yield
        finally:
            self._exchange()
            exchanged()

    @torch.no_grad()
    def _exchange(self) -> None:
        """Tensor by tensor, so that one tensor's room is enough."""
        for average, weight in zip(*self._local(), strict=True):
            kept = weight.clone()
            weight.copy_(average)
            average.copy_(kept)

    def _local(self) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """This rank's parts of the averages and of the weights."""
        return [to_local(t) for t in self.averages.values()], [to_local(t) for t in self.weights.values()]
