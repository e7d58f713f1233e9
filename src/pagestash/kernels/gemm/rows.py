"""Rows in expert order that need not exist: a product may gather them from the tokens itself.

T tokens of K choices, R rows of capacity, D columns.
"""

import torch

from pagestash.kernels.moe.permute import permute


class TokenRows:
    """The rows [R, D] of tokens [T, D]. `order_R` has the choice of each row, `inverse_TK` the row of each
    choice."""

    def __init__(self, tokens_TD: torch.Tensor, inverse_TK: torch.Tensor, order_R: torch.Tensor) -> None:
        self.tokens_TD, self.inverse_TK, self.order_R = tokens_TD, inverse_TK, order_R
        self._rows_RD: torch.Tensor | None = None
        self._token_R: list[torch.Tensor] = []  # once it is made, for all rows of these tokens

    @property
    def shape(self) -> tuple[int, int]:
        return self.order_R.numel(), self.tokens_TD.shape[1]

    def of(self, tokens_TD: torch.Tensor) -> "TokenRows":
        """The rows of other tensors of the same tokens."""
        other = TokenRows(tokens_TD, self.inverse_TK, self.order_R)
        other._token_R = self._token_R
        return other

    @property
    def token_R(self) -> torch.Tensor:
        """The token of each row, int32; undefined past the valid rows."""
        if not self._token_R:
            self._token_R.append(self.order_R // self.inverse_TK.shape[1])
        return self._token_R[0]

    def permuted(self) -> torch.Tensor:
        """The rows in memory, made at the first call."""
        if self._rows_RD is None:
            self._rows_RD = permute(self.tokens_TD, self.inverse_TK, self.order_R.numel())
        return self._rows_RD


Rows = torch.Tensor | TokenRows
"""Rows [R, ·] of a grouped product."""


def in_memory(rows: Rows) -> torch.Tensor:
    return rows if isinstance(rows, torch.Tensor) else rows.permuted()
