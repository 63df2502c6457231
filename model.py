"""
The one small Transformer that all trainers train. What varies is the residual rule: the arm.

    standard        x <- x + Attn(norm(x)),  x <- x + MLP(norm(x))                       pre-norm, RoPE, MLP 4d
    consensus       x <- normalize(x + eta P_x A(x) x),  x <- normalize(x + eta P_x MLP(x))       bare block, MLP 6d
    consensus-v     the same with value and output projections in the attention                             MLP 5d
    consensus-qkv   and one projection shared by query and key, normalised per head                       MLP 4.5d

    sphere          x <- normalize(x + h P_x Attn(norm(x))),  the same with MLP          standard's parts, MLP 4d

P_x is the projection on the tangent space at x. In the consensus arms every head's part of a state is a unit vector; in
`sphere` the whole state is one, and a noise module may follow each layer. Each layer has exactly 12 d^2 + 2 d parameters
in every arm: the MLP takes what the attention leaves, and the consensus arms spend the two norm gains on a step size per
channel for each of the two updates.

    symbol   here      shape
    x        x         (B, T, d)       standard: free; sphere: unit; otherwise unit per head
    eta      eta       (d,)            one step size per channel
    h        step      a number        step of `sphere`
"""

import torch
import torch.nn as nn
import torch.nn.functional as F

from rope_consensus import ConsensusAttention, rope_tables, rotate, tangent, unit

# arm: (projections of ConsensusAttention, MLP width over d)
ARMS = {
    "standard": (None, 4),
    "consensus": ({}, 6),
    "consensus-v": ({"value": True}, 5),
    "consensus-qkv": ({"value": True, "qk": True}, 4.5),
}


class StandardBlock(nn.Module):
    """Pre-norm RoPE attention and MLP. (B, T, d) -> (B, T, d)."""

    def __init__(self, dim, heads, layers, width, causal, dropout=0.0):
        super().__init__()
        self.heads, self.causal, self.dropout = heads, causal, nn.Dropout(dropout)
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
        q, k, v = self.proj_in(x).unflatten(-1, (3, self.heads, -1)).movedim(-3, 0).transpose(-2, -3)
        m = F.scaled_dot_product_attention(rotate(q, *tables), rotate(k, *tables), v, is_causal=self.causal)
        return self.dropout(self.proj_out(m.transpose(-2, -3).flatten(-2)))

    def mlp(self, x):
        return self.dropout(self.down(F.gelu(self.up(x))))

    def forward(self, x, tables):
        x = x + self.attention(self.norm_attn(x), tables)
        return x + self.mlp(self.norm_mlp(x))


class SphereBlock(StandardBlock):
    """StandardBlock's two updates as steps on the unit sphere, then noise. (B, T, d) -> (B, T, d), unit rows."""

    def __init__(self, dim, heads, layers, width, causal, step, noise=None):
        super().__init__(dim, heads, layers, width, causal)
        self.step, self.noise = step, noise
        for layer in (self.proj_out, self.down):  # the step size makes the updates small here
            nn.init.normal_(layer.weight, std=layer.in_features ** -0.5)

    def forward(self, x, tables):
        scale = x.shape[-1] ** 0.5  # norm(x) = scale * gain * x for unit rows
        h = self.step / scale  # an update has channels of size 1, a unit row of size d^(-1/2)
        m = self.attention(x * (scale * self.norm_attn.weight), tables)
        x = unit(torch.add(x, tangent(x, m.to(x.dtype)), alpha=h))  # x <- normalize(x + h P_x Attn(norm(x)))
        m = self.mlp(x * (scale * self.norm_mlp.weight))
        x = torch.add(x, tangent(x, m.to(x.dtype)), alpha=h)
        return unit(x) if self.noise is None else self.noise(x)  # which normalises first


class ConsensusBlock(nn.Module):
    """Spherical attention and MLP, every head's part of x a unit vector. (B, T, d) -> (B, T, d)."""

    def __init__(self, dim, heads, layers, width, eta_mlp, attention):
        super().__init__()
        self.heads = heads
        self.attn = attention
        self.up, self.down = nn.Linear(dim, width, bias=False), nn.Linear(width, dim, bias=False)
        nn.init.normal_(self.up.weight, std=dim ** -0.5)
        for layer in filter(None, (self.down, attention.proj_out)):  # small first steps, as in the standard arm
            nn.init.normal_(layer.weight, std=(2 * layers * layer.in_features) ** -0.5)
        self.eta = nn.Parameter(torch.full((dim,), float(eta_mlp)))

    def forward(self, x, tables):
        x = self.attn.step(x.unflatten(-1, (self.heads, -1)), tables)
        scale = x.shape[-1] ** 0.5  # unit per head has channels of size 1/scale; the MLP sees size 1
        u = self.down(F.gelu(F.linear(x.flatten(-2), self.up.weight * scale))).view_as(x)
        # x <- normalize(x + eta P_x MLP(x))
        return unit(torch.addcmul(x, self.eta.view(x.shape[-2:]) / scale, tangent(x, u.to(x.dtype)))).flatten(-2)


class Transformer(nn.Module):
    """Token ids (B, T) -> logits (B, T, vocab), and the mean cross entropy in nats where targets (B, T) are given.

    eta, eta_mlp, beta: of the consensus arms. step, noise: of the sphere arm; noise(layer) -> module or None.
    dropout: of the standard arm, on both residual updates. loop: one block applied `layers` times.
    """

    def __init__(self, vocab, layers, dim, heads, arm="standard", causal=True, loop=False, dropout=0.0, eta=1.0, eta_mlp=1.0,
                 beta=8.0, step=1.0, noise=lambda layer: None):
        super().__init__()
        if arm not in (*ARMS, "sphere"):
            raise ValueError(f"unknown arm {arm!r}: one of {', '.join(ARMS)}, sphere")
        if dim % heads or (dim // heads) % 2:
            raise ValueError(f"dim {dim} must be heads ({heads}) times an even head size, for RoPE's pairs")
        self.arm, self.layers, self.heads, self.d_head = arm, layers, heads, dim // heads
        self.spheres = {"standard": 0, "sphere": 1}.get(arm, heads)  # that a state is a product of
        projections, ratio = ARMS.get(arm, ARMS["standard"])
        sizes = (dim, heads, layers, int(ratio * dim))

        def block(layer):
            if arm == "standard":
                return StandardBlock(*sizes, causal, dropout)
            if arm == "sphere":
                return SphereBlock(*sizes, causal, step, noise(layer))
            return ConsensusBlock(*sizes, eta_mlp, ConsensusAttention(dim, heads, eta, beta, causal, **projections))

        self.embed = nn.Embedding(vocab, dim)
        nn.init.normal_(self.embed.weight)
        self.blocks = nn.ModuleList(block(layer) for layer in range(1 if loop else layers))
        self.norm = nn.RMSNorm(dim)
        self.head = nn.Linear(dim, vocab, bias=False)
        nn.init.normal_(self.head.weight, std=dim ** -0.5)

    def stack(self):
        """The blocks in the order they are applied: one block again and again where loop is set."""
        return [self.blocks[i % len(self.blocks)] for i in range(self.layers)]

    def on_spheres(self, x):
        """x (..., d), normalised on each sphere that a state is a product of."""
        return unit(x.unflatten(-1, (self.spheres, -1))).flatten(-2) if self.spheres else x

    def start(self, x):
        """The first state of embedded tokens x (B, T, d), on its spheres, and the rotation tables, shared by all layers."""
        return self.on_spheres(x), rope_tables(torch.arange(x.shape[-2], device=x.device), self.d_head)

    def read(self, x):
        """Embedded tokens (B, T, d) -> the last state, normalised for the head, (B, T, d)."""
        x, tables = self.start(x)
        for block in self.stack():
            x = block(x, tables)
        return self.norm(x)

    @torch.no_grad()
    def states(self, x):
        """Embedded tokens (B, T, d) -> the state before every layer, and after the last: L + 1 tensors (B, T, d)."""
        x, tables = self.start(x)
        states = [x]
        for block in self.stack():
            states.append(block(states[-1], tables))
        return states

    def embedded(self, idx):
        """Token ids (B, T) -> (B, T, d)."""
        return self.embed(idx)

    def logits(self, x):
        """Embedded tokens (B, T, d) -> (B, T, vocab)."""
        return self.head(self.read(x))

    def score(self, x, targets):
        """Embedded tokens (B, T, d), targets (B, T) -> mean cross entropy in nats, share of right predictions."""
        logits = self.logits(x).float()
        return (F.cross_entropy(logits.flatten(0, -2), targets.flatten()),
                (logits.argmax(-1) == targets).float().mean())

    @torch.no_grad()
    def control(self, idx, act=True):
        """ConsensusAttention.control in every layer, at the state each has under these ids. Returns (3, layers): lambda_max,
        eta asked and eta used, the largest of its heads."""
        training = self.training
        self.eval()  # without noise: a look at the model does not change what is drawn next
        (x, tables), seen = self.start(self.embedded(idx)), []
        for block in self.stack():
            block.attn.control(x, act)
            seen.append(torch.stack((block.attn.lam, block.attn.eta_asked, block.attn.eta_used)).amax(-1))
            x = block(x, tables)
        self.train(training)
        return torch.stack(seen, 1)

    def forward(self, idx, targets=None):
        logits = self.logits(self.embedded(idx))
        if targets is None:
            return logits, None
        return logits, F.cross_entropy(logits.flatten(0, -2).float(), targets.flatten())


class PatchTransformer(Transformer):
    """Flattened image patches (B, P, patch) -> class logits (B, classes), from the mean over the patches; bidirectional."""

    def __init__(self, classes, patches, patch, layers, dim, heads, **options):
        super().__init__(classes, layers, dim, heads, causal=False, **options)
        self.embed = nn.Linear(patch, dim, bias=False)
        self.place = nn.Parameter(torch.randn(patches, dim) * 0.1)  # RoPE knows the raster order alone, not the plane

    def embedded(self, x):
        """(B, P, patch) -> (B, P, d)."""
        return self.embed(x) + self.place

    def logits(self, x):
        """Embedded patches (B, P, d) -> (B, classes)."""
        return self.head(self.read(x).mean(-2))
