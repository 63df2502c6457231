"""
Tangent Brownian noise: tokens on the unit sphere, moved by one symmetric Gaussian matrix that all of them share and by
one Gaussian vector each. The matrix drives every pair to x_i = +x_j or x_i = -x_j; the vectors work against both.

    A = (G + G^T)/sqrt(2),  G_ab ~ N(0, 1)             Var A_ij = 1 (i != j), Var A_ii = 2; one A a step, for all tokens
    p_i = A x_i - x_i (x_i^T A x_i)                    tangent at x_i
    q_i = z_i - x_i (x_i^T z_i),   z_i ~ N(0, I)       tangent at x_i; one z a token
    y_i = x_i + h f_i + a p_i + gamma sqrt(h) q_i      f_i: a drift, such as attention
    x_i <- y_i / (||y_i|| + eps)
    a = h (common="h", the note's step), a = sqrt(h) ("sqrt_h", the diffusion limit), a = 0 ("none", the vectors alone)
    low rank, O(d r) a token: A x = U(U^T x) + V(V^T x), entries of U, V of standard deviation (2r)^(-1/4), so that
    Var A_ij = 1 as above; A's mean, a multiple of I, is projected away. signed: U U^T - V V^T, a law even in A.

What follows, c = x_i^T x_j, without drift and for small steps ((d - 1) a^2 << 1); tests hold the code to it:
    E||p||^2 = E||q||^2 = d - 1, full and low rank, for steps of any size
    a step changes c by -2 a^2 c (1 - c^2) - (d - 1) gamma^2 h c, variance 4 a^2 (1 - c^2)^2 + 2 gamma^2 h (1 - c^2)
    gamma = 0: the angle is a martingale, so a pair ends antipodal with probability (first angle)/pi
    gamma > 0: c has the stationary density (1 - c^2)^((d-3)/2) (1 - c^2 + k)^(-d/2), k = gamma^2 h/(2 a^2). It is even:
    antipodal pairs become as frequent as aligned ones. From random tokens their share only grows, so that nothing
    disappears later: |c| is a reversible diffusion on a line, and its first density over its last one falls with |c|.

    symbol     here        shape
    x_i        x           (..., n, d)       tokens on the last axis but one, any leading axes
    A          A           (d, d); (..., d, d) one a sequence; or (U, V), each (..., d, r)
    z_i, f_i   z, drift    (..., n, d)
    h, gamma   h, gamma    depth step, forcing amplitude

Source: the note "Tangent Brownian symmetry breaking". On the shared noise alone: arXiv 2603.06187.
Attention alone: two antipodal tokens attract with positive probability iff d - 2 < cosh 2 beta, arXiv 2601.21942.
One file that needs torch alone: copy it. (Only the demo below also reads metrics.py.)

    from noise_block import TangentNoise, attach
    x = TangentNoise(dim=768, h=0.01, gamma=0.03, rank=8)(x)       # in your block, after a residual step
    noise = attach(model.transformer.h, 768, h=0.01, gamma=0.03)   # after the blocks of any model; noise.remove()
    # a step moves a unit token by ((d - 1)(a^2 + gamma^2 h))^(1/2), here 0.29: the note's h = 1/layers leaves nothing of it
    $ python noise_block.py          # about 50 s on two CPU cores: the laws, pairs, clusters, entropy against depth; a verdict
    $ python noise_block.py --gif    # and tokens on the 2-sphere, animated
"""
import functools
import math

import torch
import torch.nn as nn


def wide(x):
    """x in float32 at least: norms and inner products are not taken in 16 bits."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def polar(x, eps=1e-8):
    """x (..., d) -> direction x/(||x|| + eps) (..., d) and length ||x|| (..., 1), in float32 at least.

    A zero token has direction zero and gradient zero: ||x|| has no derivative there, and 1/eps overflows float16."""
    x = wide(x)
    length = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    return x * (torch.nn.functional.threshold(length, 0, torch.inf) + eps).reciprocal(), length


def unit(x, eps=1e-8):
    """x / (||x|| + eps) over the last axis, the norm in float32 at least. (..., d) -> (..., d), same dtype."""
    return polar(x, eps)[0].to(x.dtype)


def tangent(x, v):
    """v - x (x^T v): the part of v tangent to the sphere at the unit tokens x. (..., d), (..., d) -> (..., d)."""
    return (v - x * (wide(x) * v).sum(-1, keepdim=True)).to(v.dtype)


# ------------------------------------------------------------------------------------------------ one step

def require(condition, message):
    if not condition:
        raise ValueError(message)


def require_dim(d):
    require(d >= 2, f"dim must be at least 2, not {d}: on a line the sphere is two points and has no tangents")


def require_rank(r, d):
    require(1 <= r <= d, f"rank must be from 1 to dim = {d}, not {r}; leave it out for the full matrix")


def require_float(x, name):
    require(x.is_floating_point(), f"{name}: the tokens are {x.dtype}; embed them first")


def require_finite(values, name):
    require(torch.isfinite(values).all(), f"{name}: tokens are not finite before the noise, or too long for their norm to "
            "be; look at what feeds it (learning rate, 16-bit overflow, an all-masked row)")


def symmetrize(G):
    """N(0, 1) entries -> A of the Gaussian orthogonal ensemble. (..., d, d) -> (..., d, d)."""
    return (G + G.mT) / math.sqrt(2)


def factors(G):
    """N(0, 1) entries (..., d, 2r) -> (U, V). A_ij sums 2r products of two entries: Var A_ij = 2r s^4 = 1."""
    return (G * G.shape[-1] ** -0.25).chunk(2, dim=-1)


def symmetric_gaussian(d, generator=None, **to):
    """A = (G + G^T)/sqrt(2), (d, d). to: dtype, device."""
    return symmetrize(torch.randn(d, d, generator=generator, **to))


def low_rank_symmetric(d, r, generator=None, **to):
    """(U, V), each (d, r), for A = U U^T + V V^T of off-diagonal variance 1. ValueError unless 1 <= r <= d."""
    require_rank(r, d)
    return factors(torch.randn(d, 2 * r, generator=generator, **to))


def step_sizes(h, gamma, common="h"):
    """(a, g), the factors of p and q. ValueError for h or gamma negative or not finite, or an unknown `common`."""
    for name, value, hint in (("h", h, "a depth step, such as 1/layers"), ("gamma", gamma, "0 leaves out q")):
        require(math.isfinite(value) and value >= 0, f"{name} must be finite and at least 0, not {value}: {hint}")
    sizes = {"h": h, "sqrt_h": math.sqrt(h), "none": 0.0}
    require(common in sizes, f"unknown common {common!r}: one of {', '.join(sizes)}")
    return sizes[common], gamma * math.sqrt(h)


def shared_product(A, x, a=1.0, signed=False):
    """a A x_i for every token of x (..., n, d); A (..., d, d), or (U, V), which never forms a d x d matrix."""
    if isinstance(A, (tuple, list)):
        U, V = A
        y = (x @ torch.cat((U, V), -1)) @ (a * torch.cat((U, -V if signed else V), -1)).mT
    else:
        y = x @ (a * A).mT
    return y.to(x.dtype)  # autocast multiplies in 16 bits; what follows is in float32


def move(x, h, a, g, A, z, drift=None, signed=False, eps=1e-8):
    """One step with A and z given (A None where a = 0), in few passes over the tokens: they cost the time."""
    # a p + g q = P_x w with one projection for both,  w = a A x + g z
    w = g * z if A is None else torch.add(shared_product(A, x, a, signed), z, alpha=g)
    # y = x + P_x w = w + (1 - x^T w) x
    y = torch.addcmul(w, x, 1 - (x * w).sum(-1, keepdim=True))
    return unit(y if drift is None else y + h * drift, eps)


def tangent_noise_step(x, h, gamma, A=None, drift=None, common="h", signed=False, eps=1e-8, generator=None):
    """One noise step on unit tokens x (..., n, d) -> x', same shape and dtype. To split the drift off, put
    unit(x + h f) in the place of x.

    A: as in the table, symmetric; None: drawn, one (d, d) for all. drift: f(x), already evaluated, same shape as x.
    All draws come from `generator`, A's first, or from torch's own if None.
    ValueError: h, gamma, common, d = 1, tokens that are not finite (which a compiled graph does not check)."""
    a, g = step_sizes(h, gamma, common)
    d = x.shape[-1]
    require_dim(d)
    require_float(x, "tangent_noise_step")
    u = wide(x)
    if not torch.compiler.is_compiling():
        require_finite(u, "tangent_noise_step")
    if A is None:
        A = symmetric_gaussian(d, generator, dtype=u.dtype, device=u.device)
    z = torch.randn(u.shape, generator=generator, dtype=u.dtype, device=u.device)
    return move(u, h, a, g, A, z, drift, signed, eps).to(x.dtype)


# ------------------------------------------------------------------------------------------------ modules

def mix(*parts):
    """Integers -> one 64-bit seed by the finaliser of SplitMix64, so that neighbours give unrelated seeds. Of it torch's CPU
    generator takes 32 bits: among 65,000 draws two are equal by chance."""
    v = 0
    for part in parts:
        v = ((v ^ part) + 0x9E3779B97F4A7C15) % 2 ** 64
        v = (v ^ v >> 30) * 0xBF58476D1CE4E5B9 % 2 ** 64
        v = (v ^ v >> 27) * 0x94D049BB133111EB % 2 ** 64
        v ^= v >> 31
    return v


def seeded_normal(state: torch.Tensor, length: torch.Tensor, common: list[int], tokens: list[int], token_seed: int,
                  name: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw number state[1] of seed state[0]: N(0, 1) of size `common`, for A, and of size `tokens`, for z.

    Each draw seeds Generators of its own on the tokens' device, so that the state is two integers: nothing else advances
    it, it fits every device, and restoring it resumes exactly. length (..., 1) gives dtype and device, and is checked
    for finite values if there is a `name`."""
    if torch._C._current_graph_task_id() != -1:
        raise RuntimeError("noise drawn again inside backward() by activation checkpointing: the gradient would belong "
                           "to other noise; keep the noise outside the checkpointed part")
    if name:
        require_finite(length, name)
    seed, n = state.tolist()
    state[1] = n + 1
    to = {"dtype": length.dtype, "device": length.device}
    for_A = torch.Generator(length.device).manual_seed(mix(seed, n, 0))
    for_z = torch.Generator(length.device).manual_seed(mix(seed, n, 1, token_seed))
    return torch.randn(common, generator=for_A, **to), torch.randn(tokens, generator=for_z, **to)


# A Generator would break a compiled graph. There the same function is one operator, of which the shapes are known.
compiled_normal = torch.library.custom_op("nanosphere::seeded_normal", seeded_normal, mutates_args=("state",))


@compiled_normal.register_fake
def _(state, length, common, tokens, token_seed, name):
    return length.new_empty(common), length.new_empty(tokens)


class SphereNoise(nn.Module):
    """What TangentNoise and IsotropicNoise share: the way to the sphere and back, seeded draws, and their state.

    seed          equal seeds give equal noise whatever else the program draws; give each layer its own
    token_seed    of z alone. Data-parallel: with one `seed` on all ranks A is the same on every rank, and so is z;
                  token_seed=<this rank> gives every rank its own z and leaves A as it is
    always_on     noise in evaluation too; otherwise evaluation draws nothing and leaves the state alone
    keep_norm     False: unit tokens come out. True: only directions move; off, the tokens pass unchanged
    name, check   of the layer, for messages; refuse non-finite tokens (None: on the CPU alone, where it needs no sync)

    state_dict() holds the seed and the number of draws; it loads on every device and with weights_only=True."""

    def __init__(self, dim, seed=0, token_seed=0, always_on=False, keep_norm=False, name=None, check=None):
        super().__init__()
        require_dim(dim)
        self.dim, self.token_seed, self.always_on, self.keep_norm = dim, token_seed, always_on, keep_norm
        self.name, self.check = name or type(self).__name__, check
        self.state = torch.tensor([seed, 0], device="cpu")  # not a buffer: on the CPU it is read without a sync

    def get_extra_state(self):
        return self.state.clone()

    def set_extra_state(self, state):
        self.state.copy_(state)

    @property
    def on(self):
        return self.training or self.always_on

    def enter(self, x):
        require(not x.is_nested, f"{self.name}: nested tokens; give nn.TransformerEncoder enable_nested_tensor=False")
        require(x.shape[-1] == self.dim, f"{self.name}: built for dim = {self.dim}, but the tokens have {x.shape[-1]}")
        require_float(x, self.name)
        return polar(x)

    def leave(self, u, length, dtype):
        return (length * u if self.keep_norm else u).to(dtype)

    def normal(self, length, common=(0,)):
        check = length.device.type == "cpu" if self.check is None else self.check
        draw = compiled_normal if torch.compiler.is_compiling() else seeded_normal
        return draw(self.state, length.detach(), [*common], [*length.shape[:-1], self.dim], self.token_seed,
                    self.name if check else "")


class TangentNoise(SphereNoise):
    """Normalises tokens x (..., n, dim) and makes the step at the top of this file; same shape and dtype.

    rank, signed  A = U U^T + V V^T (signed: - V V^T) with U, V (dim, rank); rank None: full
    common        a = h ("h"), sqrt(h) ("sqrt_h"), 0 ("none")
    shared        one A for the "batch", or one for each "sequence" (leading index)
    drift         how forward(x, drift=f) adds f: "euler": h f inside the step; "split": x <- unit(x + h f) first
    Other options: SphereNoise. ValueError at construction for a value out of range."""

    def __init__(self, dim, h, gamma, rank=None, signed=False, common="h", shared="batch", always_on=False, seed=0,
                 drift="euler", **options):
        super().__init__(dim, seed, always_on=always_on, **options)
        for key, value, known in (("shared", shared, ("batch", "sequence")), ("drift", drift, ("euler", "split"))):
            require(value in known, f"unknown {key} {value!r}: one of {', '.join(known)}")
        if rank is not None:
            require_rank(rank, dim)
        self.a, self.g = step_sizes(h, gamma, common)
        self.h, self.gamma, self.common, self.rank, self.signed = h, gamma, common, rank, signed
        self.shared, self.drift = shared, drift

    def forward(self, x, drift=None):
        """drift: f(x), already evaluated, same shape; it moves the tokens in evaluation too."""
        if self.keep_norm and not self.on and drift is None:
            return x
        u, length = self.enter(x)
        if drift is not None and (self.drift == "split" or not self.on):
            u, drift = unit(u + self.h * drift), None
        if self.on:
            lead = length.shape[:-2] if self.shared == "sequence" else ()
            G, z = self.normal(length, (*lead, self.dim, 2 * self.rank if self.rank else self.dim) if self.a else (0,))
            A = None if not self.a else factors(G) if self.rank else symmetrize(G)
            u = move(u, self.h, self.a, self.g, A, z, drift, self.signed)
        return self.leave(u, length, x.dtype)

    def extra_repr(self):
        return f"dim={self.dim}, h={self.h}, gamma={self.gamma}, rank={self.rank}, common={self.common!r}"


class IsotropicNoise(SphereNoise):
    """The control: x <- unit(x + sigma z), z ~ N(0, I) in all dim directions. Other options: SphereNoise."""

    def __init__(self, dim, sigma, seed=0, **options):
        super().__init__(dim, seed, **options)
        require(math.isfinite(sigma) and sigma >= 0, f"sigma must be finite and at least 0, not {sigma}")
        self.sigma = sigma

    def forward(self, x):
        if self.keep_norm and not self.on:
            return x
        u, length = self.enter(x)
        if self.on:
            u = unit(u + self.sigma * self.normal(length)[1])
        return self.leave(u, length, x.dtype)


def matched_sigma(dim, h, gamma, common="h"):
    """sigma at which IsotropicNoise spends the tangent step's E||dx||^2, both before the retraction to the sphere.

    tangent: E||a p + gamma sqrt(h) q||^2 = (d - 1)(a^2 + gamma^2 h);   isotropic: E||sigma z||^2 = d sigma^2."""
    require_dim(dim)
    a, g = step_sizes(h, gamma, common)
    return math.sqrt((dim - 1) / dim * (a * a + g * g))


class Attached(nn.ModuleList):
    """What attach returns: the noise modules in order. state_dict() holds the noise's state; remove() takes it off."""

    def __init__(self, blocks, noises):
        super().__init__(noises)
        # partial, and not a closure: a model with its hooks can be pickled, and a deep copy has noise of its own
        self.handles = [block.register_forward_hook(functools.partial(noise_after, noise))
                        for block, noise in zip(blocks, noises)]

    def remove(self):
        for handle in self.handles:
            handle.remove()


def noise_after(noise, block, args, output):
    """The forward hook of attach."""
    tokens, rest = (output[0], output[1:]) if isinstance(output, tuple) else (output, None)
    require(isinstance(tokens, torch.Tensor), f"{noise.name}: got {type(tokens).__name__}; attach to a module "
            "that returns tokens (..., n, dim), or a tuple that begins with them")
    noise.train(block.training)
    return noise(tokens) if rest is None else (noise(tokens), *rest)


def attach(modules, dim, h, gamma, seed=0, keep_norm=True, **options):
    """TangentNoise after each of `modules` (one, or a list) through forward hooks; the model itself is not changed.

    A module is a residual block, or a value/output projection; an nn.Sequential counts as one. It returns tokens
    (..., n, dim), or a tuple that begins with them. Its noise is on while it is in training mode. keep_norm is True by
    default: a model that was not trained on the sphere needs its lengths. Module i draws from seed + i; options are
    TangentNoise's. To resume exactly, save the returned object's state_dict() beside the model's."""
    blocks = list(modules) if isinstance(modules, (list, tuple, nn.ModuleList)) else [modules]
    return Attached(blocks, [TangentNoise(dim, h, gamma, seed=seed + i, keep_norm=keep_norm,
                                          name=f"noise after {type(block).__name__} {i}", **options)
                             for i, block in enumerate(blocks)])


# ------------------------------------------------------------------------------------------------ demo

RULE = """rise: the antipodal fraction's peak exceeds its start by 0.05 and by 3 standard errors of that difference over
      seeds; falls: it ends at half of the peak or less, and below the peak by 3 standard errors, else it stays; gone: below
      a tenth of the peak by 3 standard errors; in part: above a tenth by 3; perhaps gone: neither"""


def attention(x, beta):
    """Self-attention on the sphere, as a drift: P_x softmax(beta x x^T) x. (..., n, d) -> (..., n, d)."""
    return tangent(x, torch.softmax(beta * x @ x.mT, -1) @ x)


def stationary_antipodal(dim, h, gamma, common, threshold=-0.9):
    """P(c < threshold) for a pair in the stationary law without drift; 1/2, its limit, at gamma = 0.

    dc = m dt + s dW has the stationary density exp(integral of 2m/s^2)/s^2. With m and s^2 from the top of the file,
    partial fractions in 1 - c^2 give the density there; in the angle t, sin^(d-2) t (sin^2 t + k)^(-d/2)."""
    a, g = step_sizes(h, gamma, common)
    if g == 0:
        return 0.5
    t = torch.linspace(0, math.pi, 200_001, dtype=torch.float64)[1:-1]
    log_density = (dim - 2) * t.sin().log() - dim / 2 * (t.sin() ** 2 + g * g / (2 * a * a)).log()
    density = (log_density - log_density.max()).exp()
    return (density[t > math.acos(threshold)].sum() / density.sum()).item()


def laws(d=16, samples=10_000, seed=0):
    """The laws at the top of this file against sampling, one record each; error: one standard error of what was measured.
    holds: off the theory by less than `allowed`, 4 errors and, where it takes the steps as small,
    (d - 1)(a^2 + gamma^2 h) of its value."""
    rng = torch.Generator().manual_seed(seed)

    def record(law, theory, values, bias=0.0):
        measured, error = values.mean().item(), values.std().item() / len(values) ** 0.5
        allowed = 4 * error + bias * abs(theory)
        return {"law": law, "theory": theory, "measured": measured, "error": error, "allowed": allowed,
                "verdict": "holds" if abs(measured - theory) < allowed else "does not hold"}

    x = unit(torch.randn(samples, 1, d, generator=rng))
    for name, make, columns, signed in (("full A", symmetrize, d, False), ("rank 4", factors, 8, False),
                                        ("rank 4, signed", factors, 8, True)):
        A = make(torch.randn(samples, d, columns, generator=rng))
        yield record(f"E||p||^2 = d - 1, {name}", d - 1, tangent(x, shared_product(A, x, signed=signed)).square().sum((1, 2)))
    yield record("E||q||^2 = d - 1", d - 1, tangent(x, torch.randn(x.shape, generator=rng)).square().sum((1, 2)))
    for common, h in (("h", 0.01), ("sqrt_h", 0.001)):
        noise = TangentNoise(d, h, gamma=0.3, common=common, shared="sequence", seed=seed)
        rate = (d - 1) * (noise.a ** 2 + noise.g ** 2) / 2
        yield record(f"1 - E<x_1, x_0> = (d - 1)(a^2 + gamma^2 h)/2, a = {common}", rate, 1 - (x * noise(x)).sum((1, 2)),
                     2 * rate)

    def pairs(d, h, angle, steps):
        """c = x_i^T x_j before and after `steps` steps at gamma = 0: (2, samples)."""
        x = torch.zeros(samples, 2, d, dtype=torch.float64)
        x[:, :, 0], x[:, 1, 1] = torch.tensor([1, math.cos(angle)], dtype=torch.float64), math.sin(angle)
        states = run(TangentNoise(d, h, gamma=0.0, shared="sequence", seed=seed), x, [0, steps])
        return (states[:, :, 0] * states[:, :, 1]).sum(-1)

    for angle in (0.8, 1.6, 2.4):
        yield record(f"P(antipodal) = angle/pi at gamma = 0, first angle {angle}", angle / math.pi,
                     (pairs(4, 0.1, angle, 200)[1] < 0).double(), 3 * 0.1 ** 2)
    near = torch.log1p(-pairs(4, 0.03, 0.1, 100))
    yield record("log(1 - c) falls by 4 a^2 a step at gamma = 0, c near 1", -4 * 0.03 ** 2, (near[1] - near[0]) / 100,
                 3 * 0.03 ** 2)


def run(noise, x, depths, beta=0.0, own_A=False):
    """States at the given depths, (len(depths), ...). own_A: every token is a sequence of its own, with its own A."""
    states, shape = [], (*x.shape[:-1], 1, x.shape[-1]) if own_A else x.shape
    for depth in range(depths[-1] + 1):
        if depth in depths:
            states.append(x)
        f = attention(x, beta).view(shape) if beta else None
        x = noise(x.view(shape), f).view(x.shape)
    return torch.stack(states)


def judge(curve):
    """RULE for one antipodal fraction against depth, (depths, seeds)."""
    def above(high, low):  # by 3 standard errors of the difference, seed by seed
        return high.mean() - low.mean() > 3 * (high - low).std() / len(high) ** 0.5
    start, peak, end = curve[0], curve[curve.mean(-1).argmax()], curve[-1]
    if peak.mean() - start.mean() < 0.05 or not above(peak, start):
        return "no rise"
    if end.mean() > 0.5 * peak.mean() or not above(peak, end):
        return "rise, stays"
    if above(0.1 * peak, end):
        return "rise, then gone"
    return "rise, falls in part" if above(end, 0.1 * peak) else "rise, falls, perhaps gone"


def measure(args, depths, few):
    """One record a run: both scalings, without and with attention, every gamma, and as a control one A a token."""
    try:
        import metrics
    except ImportError:
        raise OSError("the demo also needs metrics.py: put it beside this file") from None
    x0 = unit(torch.randn(args.seeds, args.tokens, args.dim, generator=torch.Generator().manual_seed(args.seed)))
    for common, beta in [(common, beta) for common in ("h", "sqrt_h") for beta in dict.fromkeys((0.0, args.beta))]:
        for gamma, own_A in [(gamma, False) for gamma in args.gamma] + [(0.0, True)]:
            noise = TangentNoise(args.dim, args.h, gamma, common=common, shared="sequence", seed=args.seed)
            x = run(noise, x0[:4] if own_A else x0, depths, beta, own_A)
            off_diagonal = metrics.cosine_matrix(x) - 2 * torch.eye(args.tokens)
            curves = {"antipodal": metrics.antipolar_fraction(x),
                      "aligned": (off_diagonal > 0.9).sum((-2, -1)) / (args.tokens * (args.tokens - 1)),
                      "entropy": metrics.cosine_entropy(x),
                      "clusters": metrics.cluster_count(x[few, :4], restarts=2, iters=10)[0].float()}
            yield {"common": common, "beta": beta, "gamma": gamma, "own_A": own_A, "verdict": judge(curves["antipodal"]),
                   "stationary": None if beta or own_A else stationary_antipodal(args.dim, args.h, gamma, common),
                   **{key: {"mean": [round(u, 4) for u in v.mean(-1).tolist()],
                            "error": [round(u, 4) for u in (v.std(-1) / v.shape[-1] ** 0.5).tolist()]}
                      for key, v in curves.items()}}


def conclude(runs):
    """The note's hypothesis, setting by setting: {setting: what RULE found at gamma > 0 and in the controls}."""
    verdicts = {}
    for common, beta in dict.fromkeys((r["common"], r["beta"]) for r in runs):
        group = [r for r in runs if (r["common"], r["beta"]) == (common, beta)]
        found = {}
        for r in group:
            found.setdefault(r["verdict"], []).append("own A" if r["own_A"] else f"{r['gamma']:g}")
        forced = [r["verdict"] for r in group if r["gamma"] > 0]
        holds, open_ = forced.count("rise, then gone"), forced.count("rise, falls, perhaps gone")
        falls = {"rise, then gone", "rise, falls in part", "rise, falls, perhaps gone"}
        unforced = any(r["verdict"] in falls for r in group if r["gamma"] == 0) and not falls.isdisjoint(forced)
        judged = ("does not hold" if holds + open_ < len(forced) else "holds" if forced and not open_ else "not decided")
        verdicts[f"a = {common}, " + ("attention" if beta else "no drift")] = (
            f"{judged} ({holds} of {len(forced)} amplitudes{f', {open_} not decided' * (open_ > 0)}). "
            + "; ".join(f"{verdict}: gamma = {', '.join(names)}" for verdict, names in found.items())
            + ". The fall needs no gamma" * unforced)
    return verdicts


def draw_curves(runs, depths, few, path):
    from matplotlib.figure import Figure

    rows = {"antipodal": "pairs with cosine < -0.9", "aligned": "pairs with cosine > 0.9", "clusters": "clusters",
            "entropy": "cosine entropy, nats"}
    columns = list(dict.fromkeys((r["common"], r["beta"]) for r in runs))
    gammas = sorted({r["gamma"] for r in runs})
    figure = Figure(figsize=(11, 9), layout="constrained")
    axes = figure.subplots(4, 4, sharex=True, sharey="row")
    for r in runs:
        i, j = gammas.index(r["gamma"]), columns.index((r["common"], r["beta"]))
        style = {"color": str(0.75 * i / len(gammas)), "marker": "osD^vPX<>*"[i % 10], "ls": "-"}
        if r["own_A"]:
            style.update(marker="", ls=":")
        label = "gamma = 0, an A a token" if r["own_A"] else f"gamma = {r['gamma']:g}"
        for ax, key in zip(axes[:, j], rows):
            x = [depths[k] for k in few] if key == "clusters" else depths
            ax.errorbar(x, r[key]["mean"], r[key]["error"], ms=4, lw=1, label=label, **style)
        if r["stationary"] is not None:
            axes[0, j].axhline(r["stationary"], color=style["color"], ls="--", lw=0.7)
    for j, (common, beta) in enumerate(columns):
        drift = f"attention, beta = {beta:g}" if beta else "no drift (dashed: small steps)"
        axes[0, j].set_title(f"a = {common}, {drift}", fontsize=10)
        axes[3, j].set(xscale="symlog", xlabel="depth, steps", xlim=(0, depths[-1] * 1.2))
    for ax, label in zip(axes[:, 0], rows.values()):
        ax.set_ylabel(label)
    axes[1, 0].legend(fontsize=8)
    figure.savefig(path, dpi=70)


def draw_gif(args, path):
    """Tokens on the 2-sphere without drift: filled in front, hollow behind."""
    from matplotlib.animation import PillowWriter
    from matplotlib.figure import Figure

    depths, gammas = range(0, args.steps // 2 + 1, max(1, args.steps // 100)), (0.0, 0.03, 0.3)
    x0 = unit(torch.randn(args.tokens, 3, generator=torch.Generator().manual_seed(args.seed)))
    states = [run(TangentNoise(3, args.h, gamma, seed=args.seed), x0, depths) for gamma in gammas]
    figure, writer = Figure(figsize=(9, 3.4)), PillowWriter(fps=12)
    with writer.saving(figure, path, dpi=60):
        for k, depth in enumerate(depths):
            figure.clear()
            for ax, gamma, x in zip(figure.subplots(1, 3), gammas, states):
                t = torch.linspace(0, 2 * math.pi, 100)
                ax.plot(t.cos(), t.sin(), "k", lw=1)
                for side, face in ((x[k, :, 2] >= 0, "black"), (x[k, :, 2] < 0, "none")):
                    ax.scatter(*x[k, side, :2].T, facecolors=face, edgecolors="black", s=20)
                ax.set(aspect="equal", title=f"gamma = {gamma:g}, depth {depth}")
                ax.axis("off")
            writer.grab_frame()


@torch.inference_mode()
def demo(args):
    import json
    import pathlib

    torch.set_num_threads(1)  # the tensors are small
    for key, least in (("dim", 2), ("tokens", 2), ("steps", 1), ("seeds", 4), ("samples", 100)):
        require(getattr(args, key) >= least, f"--{key} must be at least {least}, not {getattr(args, key)}")
    require(len(set(args.gamma)) == len(args.gamma), "--gamma: name each value once; --seeds repeats them")
    for gamma in args.gamma:
        step_sizes(args.h, gamma)  # refuses what is no size, before anything is written
    require(math.isfinite(args.beta) and args.beta >= 0, f"--beta must be a finite number >= 0, not {args.beta}")
    out = pathlib.Path(args.out)
    out.mkdir(parents=True, exist_ok=True)
    depths = sorted({0, args.steps, *(m * 10 ** e for m in (1, 2, 5) for e in range(9) if m * 10 ** e < args.steps)})
    few = [k for k, depth in enumerate(depths) if depth in (0, args.steps, *(10 ** e for e in range(9)))]
    known = list(laws(samples=args.samples, seed=args.seed))
    for r in known:
        print(f"{r['law']:72} {r['theory']:9.4f}  measured {r['measured']:9.4f} +- {r['error']:.4f}  {r['verdict']}")
    print(f"\n{args.tokens} tokens, d = {args.dim}, h = {args.h:g}, {args.steps} steps, {args.seeds} seeds, 4 for own A\n"
          "a       drift      gamma         antipodal: peak at depth, end (small a)  aligned clusters entropy verdict")
    runs = []
    for r in measure(args, depths, few):
        runs.append(r)
        mean, error = r["antipodal"]["mean"], r["antipodal"]["error"][-1]
        theory = "" if r["stationary"] is None else f"({r['stationary']:.3f})"
        print(f"{r['common']:8}{'attention' if r['beta'] else 'none':11}{r['gamma']:<7g}{' own A' * r['own_A']:7}"
              f"{max(mean):.3f} at {depths[mean.index(max(mean))]:<6}{mean[-1]:.3f} +- {error:.3f} {theory:8}"
              f"{r['aligned']['mean'][-1]:8.3f}{r['clusters']['mean'][-1]:9.1f}{r['entropy']['mean'][-1]:8.2f} "
              f"{r['verdict']}", flush=True)
    verdicts = conclude(runs)
    print("\nHypothesis: an initial rise in antipodal pairs, then their disappearance, for gamma > 0.\nRule:", RULE)
    print(*(f"  {setting}: {sentence}" for setting, sentence in verdicts.items()), sep="\n")
    draw_curves(runs, depths, few, out / "noise.png")
    if args.gif:
        draw_gif(args, out / "noise.gif")
    record = {"args": vars(args), "torch": torch.__version__, "rule": " ".join(RULE.split()), "depths": depths,
              "cluster_depths": [depths[k] for k in few], "laws": known, "runs": runs, "verdicts": verdicts}
    part = out / "noise.json.part"
    part.write_text(json.dumps(record, indent=1), encoding="utf-8")
    part.replace(out / "noise.json")
    print(f"wrote noise.json, noise.png{', noise.gif' * args.gif} in {out}")


if __name__ == "__main__":
    import argparse

    parser = argparse.ArgumentParser(description="Antipodal pairs, clusters and entropy of tokens under tangent noise.",
                                     formatter_class=argparse.ArgumentDefaultsHelpFormatter, allow_abbrev=False)
    parser.error = lambda message: parser.exit(2, f"error: {message} (see --help)\n")  # one line, without the usage
    parser.add_argument("--gamma", type=float, nargs="+", default=[0.0, 1e-3, 3e-3, 1e-2, 3e-2, 0.1, 0.3],
                        help="forcing amplitudes")
    parser.add_argument("--h", type=float, default=0.05, help="depth step")
    parser.add_argument("--beta", type=float, default=1.0, help="inverse temperature of the attention")
    parser.add_argument("--tokens", type=int, default=64, help="tokens in a sequence")
    parser.add_argument("--dim", type=int, default=16, help="dimension of a token")
    parser.add_argument("--steps", type=int, default=2000, help="depth steps")
    parser.add_argument("--seeds", type=int, default=16, help="sequences, each with its own tokens and A")
    parser.add_argument("--seed", type=int, default=0, help="of all draws")
    parser.add_argument("--samples", type=int, default=10_000, help="draws in the check of the laws")
    parser.add_argument("--out", default="results/noise", help="folder for noise.json, noise.png, noise.gif")
    parser.add_argument("--gif", action="store_true", help="animate tokens on the 2-sphere as well")
    parser.add_argument("--debug", action="store_true", help="show an error's traceback")
    arguments = parser.parse_args()
    if arguments.out == "":
        parser.exit(2, "error: --out is empty: name a folder\n")  # as an unset variable of the shell is
    try:
        demo(arguments)
    except (ValueError, OSError, RuntimeError) as error:
        full = isinstance(error, RuntimeError)  # what torch raises where there is not enough memory
        if arguments.debug or full and "memory" not in str(error):
            raise
        parser.exit(2, f"error: {'out of memory: take fewer --tokens, --seeds or --samples' if full else error}\n")
    except KeyboardInterrupt:
        parser.exit(130)
