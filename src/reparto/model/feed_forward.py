"""The dense feed-forward part of a layer; also one expert, and the experts that all tokens pass.

D hidden   F inner width
"""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional

from reparto.config.model import ModelConfig


class FeedForward(nn.Module):
    """SwiGLU: down(silu(gate(x)) * up(x)) (Shazeer 2020, equation 6)."""

    def __init__(self, config: ModelConfig, inner: int, *, bias: bool = False) -> None:
        super().__init__()
        hidden = config.hidden_size
        self.gate_proj = nn.Linear(hidden, inner, bias=bias)
        self.up_proj = nn.Linear(hidden, inner, bias=bias)
        self.down_proj = nn.Linear(inner, hidden, bias=bias)

    def forward(self, x_XD: Tensor, context: object = None) -> Tensor:
        """(..., D) -> the same shape. The context is taken and not used."""
        inner_XF = functional.silu(self.gate_proj(x_XD)) * self.up_proj(x_XD)
        out_XD: Tensor = self.down_proj(inner_XF)
        return out_XD
