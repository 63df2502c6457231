"""
The one small Transformer that all trainers train. What varies is the residual rule: the arm.

    standard        x <- x + Attn(norm(x)),  x <- x + MLP(norm(x))                       pre-norm, RoPE, MLP 4d
    consensus       x <- normalize(x + eta P_x A(x) x),  x <- normalize(x + eta P_x MLP(x))       bare block, MLP 6d
    consensus-v     the same with value and output projections in the attention                             MLP 5d
    consensus-qkv   and one projection shared by query and key, normalised per head                       MLP 4.5d

P_x is the projection on the tangent space at x, per head; every head's part of a state is a unit vector. Each layer
has exactly 12 d^2 + 2 d parameters in every arm: the MLP takes what the attention leaves, and the controlled arms
spend the standard arm's two norm gains on a step size per channel for each of the two updates.

    symbol   here      shape
    x        x         (B, T, d)       standard: free; otherwise unit per head
    eta      eta       (d,)            one step size per channel
"""
import math

import torch
import torch.nn as nn
import torch.nn.functional as F

from rope_consensus import ConsensusAttention, attend, rope_tables, rotate, tangent, unit

# arm: (projections of ConsensusAttention, MLP width over d)
ARMS = {
    "standard": (None, 4),
    "consensus": ({}, 6),
    "consensus-v": ({"value": True}, 5),
    "consensus-qkv": ({"value": True, "qk": True}, 4.5),
}


class StandardBlock(nn.Module):
    """Pre-norm RoPE attention and MLP. (B, T, d) -> (B, T, d)."""

    def __init__(self, dim, heads, layers, width, causal):
        super().__init__()
        self.heads, self.causal = heads, causal
        self.norm_attn, self.norm_mlp = nn.RMSNorm(dim), nn.RMSNorm(dim)
        self.proj_in = nn.Linear(dim, 3 * dim, bias=False)
        self.proj_out = nn.Linear(dim, dim, bias=False)
        self.up, self.down = nn.Linear(dim, width, bias=False), nn.Linear(width, dim, bias=False)
        for layer in (self.proj_in, self.up):
            nn.init.normal_(layer.weight, std=dim ** -0.5)
        for layer in (self.proj_out, self.down):  # 2L residual additions of variance 1/(2L) each, as in GPT-2
            nn.init.normal_(layer.weight, std=(2 * layers * layer.in_features) ** -0.5)

    def attention(self, x, tables):
        # (B, T, 3d) -> three of (B, heads, T, d_head)
        q, k, v = self.proj_in(self.norm_attn(x)).unflatten(-1, (3, self.heads, -1)).movedim(-3, 0).transpose(-2, -3)
        m = F.scaled_dot_product_attention(rotate(q, *tables), rotate(k, *tables), v, is_causal=self.causal)
        return x + self.proj_out(m.transpose(-2, -3).flatten(-2))

    def forward(self, x, tables):
        x = self.attention(x, tables)
        return x + self.down(F.gelu(self.up(self.norm_mlp(x))))


class ConsensusBlock(nn.Module):
    """Spherical attention and MLP, every head's part of x a unit vector. (B, T, d) -> (B, T, d)."""

    def __init__(self, dim, heads, width, eta, eta_mlp, attention):
        super().__init__()
        self.heads = heads
        self.attn = attention
        self.up, self.down = nn.Linear(dim, width, bias=False), nn.Linear(width, dim, bias=False)
        nn.init.normal_(self.up.weight, std=dim ** -0.5)
        nn.init.normal_(self.down.weight, std=width ** -0.5)
        self.eta = nn.Parameter(torch.full((dim,), float(eta_mlp)))

    def forward(self, x, tables):
        x = self.attn(x, tables)
        scale = (x.shape[-1] // self.heads) ** 0.5  # unit per head has channels of size 1/scale; the MLP sees size 1
        u = self.down(F.gelu(self.up(x * scale)))
        x, u, eta = (z.unflatten(-1, (self.heads, -1)) for z in (x, u, self.eta / scale))
        return unit(x + eta * tangent(x, u)).flatten(-2)  # x <- normalize(x + eta P_x MLP(x))


class Transformer(nn.Module):
    """Token ids (B, T) -> logits (B, T, vocab), and the mean cross entropy in nats where targets (B, T) are given."""

    def __init__(self, vocab, layers, dim, heads, arm="standard", eta=1.0, eta_mlp=None, beta=8.0, causal=True,
                 loop=False):
        super().__init__()
        if arm not in ARMS:
            raise ValueError(f"unknown arm {arm!r}: one of {', '.join(ARMS)}")
        projections, width = ARMS[arm]
        width = int(width * dim)
        if dim % heads or (dim // heads) % 2:
            raise ValueError(f"dim {dim} must be heads ({heads}) times an even head size, for RoPE's pairs")
        self.arm, self.layers, self.heads, self.d_head = arm, layers, heads, dim // heads
        self.embed = nn.Embedding(vocab, dim)
        nn.init.normal_(self.embed.weight)
        distinct = 1 if loop else layers
        if projections is None:
            blocks = [StandardBlock(dim, heads, layers, width, causal) for _ in range(distinct)]
        else:
            blocks = [ConsensusBlock(dim, heads, width, eta, eta if eta_mlp is None else eta_mlp,
                                     ConsensusAttention(dim, heads, eta, beta, causal, **projections))
                      for _ in range(distinct)]
        self.blocks = nn.ModuleList(blocks)
        self.norm = nn.RMSNorm(dim)
        self.head = nn.Linear(dim, vocab, bias=False)
        nn.init.normal_(self.head.weight, std=dim ** -0.5)

    def start(self, idx):
        """The first state and the rotation tables, shared by all layers."""
        x = self.embed(idx)
        if self.arm != "standard":
            x = unit(x.unflatten(-1, (self.heads, -1))).flatten(-2)
        return x, rope_tables(torch.arange(idx.shape[-1], device=idx.device), self.d_head)

    def stack(self):
        """The blocks in the order they are applied: one block again and again where loop is set."""
        return [self.blocks[i % len(self.blocks)] for i in range(self.layers)]

    @torch.no_grad()
    def states(self, idx):
        """The state before every layer, and after the last: L + 1 tensors (B, T, d)."""
        x, tables = self.start(idx)
        states = [x]
        for block in self.stack():
            states.append(block(states[-1], tables))
        return states

    @torch.no_grad()
    def control(self, idx, act=True):
        """ConsensusAttention.control in every layer, at the state each has under these ids. No-op where eta is absent."""
        if self.arm == "standard":
            return
        x, tables = self.start(idx)
        for block in self.stack():
            block.attn.control(x, act)
            x = block(x, tables)

    def forward(self, idx, targets=None):
        x, tables = self.start(idx)
        for block in self.stack():
            x = block(x, tables)
        logits = self.head(self.norm(x))
        if targets is None:
            return logits, None
        return logits, F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())
