"""Core attention in plain torch, for ranks without Transformer Engine: causal, padded rows or packed sequences.

Letters: s tokens of this rank, b rows, h heads of this rank, d head dimension, n packed sequences, m longest of them,
S tokens of all context-parallel ranks together.
"""

from typing import Any

import numpy as np
import torch
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from a3po_megatron.actor import parallel
from a3po_megatron.batching.packing import context_places


class CoreAttention(torch.nn.Module):
    """Stands where the Transformer Engine spec has TEDotProductAttention; no parameters, so no checkpoint entries.

    Arguments are megatron's for a core attention (megatron/core/transformer/dot_product_attention.py); only the softmax
    scale is used, since attention here is always causal and without dropout.
    """

    def __init__(
        self,
        config: Any,
        layer_number: int,
        attn_mask_type: Any,
        attention_type: str,
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        **unused: Any,
    ) -> None:
        super().__init__()
        self.softmax_scale = softmax_scale
        self.cp_size = config.context_parallel_size

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        attn_mask_type: Any = None,
        attention_bias: Tensor | None = None,
        packed_seq_params: PackedSeqParams | None = None,
    ) -> Tensor:
        """Return [s, b, h*d] for query [s, b, h, d] and key, value [s, b, h_kv, d]; [s, h*d] and [s, h, d] when packed.

        Padded rows need no mask: padding follows the real tokens, and a causal query never looks forward.
        """
        if self.cp_size > 1:
            return self._attend_over_ranks(query, key, value, packed_seq_params)
        if packed_seq_params is None:
            return self._attend(query, key, value)
        return self._attend_packed(query, key, value, packed_seq_params.cu_seqlens_q)

    def _attend(self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None) -> Tensor:
        """`mask`: which key each query sees, [queries, keys]; causal without."""
        query, key, value = (tensor.permute(1, 2, 0, 3) for tensor in (query, key, value))  # [b, h, s, d]
        out = scaled_dot_product_attention(
            query, key, value, attn_mask=mask, is_causal=mask is None, scale=self.softmax_scale, enable_gqa=True
        )
        return out.permute(2, 0, 1, 3).flatten(2).contiguous()

    def _attend_packed(self, query: Tensor, key: Tensor, value: Tensor, cu_seqlens: Tensor) -> Tensor:
        """Give each sequence a padded row of its own, attend, and put the rows end to end again."""
        starts = cu_seqlens[:-1].long()
        lengths = cu_seqlens[1:].long() - starts
        offset = torch.arange(int(lengths.max()), device=query.device)  # [m]
        real = offset < lengths[:, None]  # [n, m]
        source = (starts[:, None] + offset).where(real, starts[:, None]).T  # [m, n]; padding repeats a real token
        out = self._attend(query[source], key[source], value[source])  # [m, n, h*d]
        return out.transpose(0, 1)[real]

    def _attend_over_ranks(self, query: Tensor, key: Tensor, value: Tensor, packed: PackedSeqParams | None) -> Tensor:
        """Attend from this rank's part of each sequence to the keys of all context-parallel ranks.

        Keys and values are gathered and stay in rank order: the mask knows where each stands. Gradients of keys and values
        are summed over the ranks on the way back.
        """
        group = parallel.cp_group()
        total = query.shape[0] * self.cp_size
        boundaries = np.array([0, total]) if packed is None else packed.cu_seqlens_q.cpu().numpy()
        of_ranks = [torch.from_numpy(context_places(boundaries, rank, self.cp_size)) for rank in range(self.cp_size)]
        keys = torch.cat(of_ranks).to(query.device)  # [S] position of each gathered key in the whole row
        queries = of_ranks[group.rank()].to(query.device)  # [s]
        sequence = torch.bucketize(torch.arange(total), torch.from_numpy(boundaries[1:].astype(np.int64)), right=True)
        sequence = sequence.to(query.device)  # [S] number of the sequence at each position of the whole row
        mask = (queries[:, None] >= keys) & (sequence[queries][:, None] == sequence[keys])
        key, value = (gather_from_sequence_parallel_region(tensor, group=group) for tensor in (key, value))
        if packed is None:
            return self._attend(query, key, value, mask)
        return self._attend(query[:, None], key[:, None], value[:, None], mask)[:, 0]
