"""
Consensus-safe RoPE attention: residual attention on the unit sphere whose mixing has a proven floor and whose step
size is bounded by the spectrum of its own attention matrix. One file, torch alone: copy it.

    y_i = R_{p_i} x_i                  S_ij = y_i^T y_j = x_i^T R_{p_j - p_i} x_j        (values are not rotated)
    A = softmax(beta S)                A_ij >= exp(-2 beta)/n, since |S_ij| <= 1         (the mixing floor)
    m_i = sum_j A_ij x_j               v_i = m_i - (x_i^T m_i) x_i                       (tangent at x_i)
    x_i <- normalize(x_i + eta v_i)
    every K steps: eta <- min(eta, 0.9 eta_c),  eta_c = 2/lambda_max                     (Euler stability)

Where eta_c comes from: equal tokens are a fixed point, since values are unrotated. A small tangent disagreement there
obeys delta <- (I - eta (I - A)) delta exactly, so it grows once eta lambda_max > 2, lambda_max being the largest
eigenvalue of I - A off the consensus direction delta_i = const.

What is not in the source note:
  - Without a mask A is reversible: Z_i = sum_j exp(beta S_ij), W = exp(beta S), and Pi^(1/2) A Pi^(-1/2) =
    D_Z^(-1/2) W D_Z^(-1/2). S is a Gram matrix, so W is positive semidefinite (Schur's product theorem) and A's
    eigenvalues lie in [0, 1]: lambda_max <= 1 and eta_c >= 2 ALWAYS. The clip never goes below 2 * 0.9 = 1.8.
  - Under a causal mask A is triangular and not reversible: Lanczos on the symmetrised matrix is wrong there. The
    eigenvalues are the diagonal, A_ii = exp(beta S_ii - logsumexp_j<=i beta S_ij): exact, and no iteration. A is also
    non-normal, so the spectrum bounds long runs, not short ones: one step at eta_c enlarges some disagreement by half.
  - A_ii > 0, so lambda_max < 1 there too: eta <= 2 is stable whatever the tokens are. A clip above 2 * 0.9 holds for the
    tokens it was taken at alone: those that agree may have a larger lambda_max than these.
  - For eta <= 1 a step gives each token a sum of the tokens with weights >= 0, (1 - eta x_i^T m_i) x_i + eta sum_j A_ij x_j,
    which can't enlarge an angular diameter below pi/2, with either mask.
  - Under a causal mask row i has i + 1 tokens and the floor is exp(-2 beta)/(i + 1). Without a mask
    diam(A x) <= (1 - exp(-2 beta)) diam(x); with one only the first token is seen by all: 1 - exp(-2 beta)/n.

    symbol        here          shape
    x_i           x             (..., n, d)      unit rows; with heads: (..., n, heads * d_head), unit per head
    R_{p_i}       rope          (..., n, d)      half-split pairs (j, j + d/2), angle p base^(-2j/d)
    A             attention_matrix (..., n, n)
    eta, beta     eta, beta     scalars; the module has one eta per channel, (dim,)
    lambda_max    lambda_max    (...)            with its residual and a flag

Source: the note "Consensus-Safe RoPE Residual Attention". RoPE: Su et al., arXiv 2104.09864, in Llama's convention.

    from rope_consensus import ConsensusAttention
    $ python rope_consensus.py     # about 20 s on two CPU cores: eta_c against the measured threshold, contraction
"""
import math

import torch
import torch.nn as nn
import torch.nn.functional as F

DENSE_LIMIT = 4096 * 4096  # numbers in n x n matrices up to which their upper halves are kept, not computed again and again
BLOCK = 2 ** 20  # numbers in a tile of them, which stays in the cache


def wide(x):
    """x in float32 at least: norms, softmax and rotations are not done in 16 bits."""
    return x.float() if x.dtype in (torch.float16, torch.bfloat16) else x


def unit(x, eps=1e-8):
    """x / ||x|| over the last axis, in float32 at least. Rows shorter than eps become zero, with zero gradient."""
    w = wide(x)
    return (w * F.threshold((w * w).sum(-1, keepdim=True), eps * eps, torch.inf).rsqrt()).to(x.dtype)


def tangent(x, v):
    """v - x (x^T v): the part of v tangent to the sphere at the unit rows x. (..., d), (..., d) -> (..., d)."""
    return torch.addcmul(v, x, (x * v).sum(-1, keepdim=True), value=-1)


# ---------------------------------------------------------------------------------------------------- RoPE

def rope_tables(positions, d, base=10000.0, dtype=torch.float32):
    """(cos, cos) and (-sin, sin) of p base^(-2j/d), each (n, d). Float64 angles: float32 misses by 0.004 at p = 1e5."""
    if d % 2:
        raise ValueError(f"RoPE turns pairs of channels: the head size must be even, not {d}")
    device = positions.device
    positions = positions.to("cpu" if device.type == "mps" else device).double()  # MPS has no float64
    inv_freq = base ** (-torch.arange(0, d, 2, device=positions.device, dtype=torch.float64) / d)
    angle = positions[:, None] * inv_freq
    cos, sin = angle.cos().to(device, dtype), angle.sin().to(device, dtype)
    return torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1)


def rotate(x, cos, sin):
    """R x for tables of rope_tables, half-split pairs (a, b). x: (..., n, d)."""
    # (a, b) -> (a cos - b sin, b cos + a sin) = (a, b) (cos, cos) + (b, a) (-sin, sin), in the tables' precision
    return torch.addcmul(x * cos, x.roll(x.shape[-1] // 2, -1), sin).to(x.dtype)


def rope(x, positions=None, base=10000.0):
    """Rotary position embedding, y_i = R_{p_i} x_i: keeps norms, and y_i^T y_j depends on p_i - p_j alone.

    x: (..., n, d), d even; positions: (n,), default 0..n-1. ValueError when d is odd.
    """
    if positions is None:
        positions = torch.arange(x.shape[-2], device=x.device)
    return rotate(x, *rope_tables(positions, x.shape[-1], base, wide(x).dtype))


def scores(x, base=10000.0):
    """S_ij = x_i^T R_{p_j - p_i} x_j, in [-1, 1] for unit rows. (..., n, d) -> (..., n, n)."""
    y = rope(x, base=base)
    return y @ y.mT


# ------------------------------------------------------------------------------------------- attention step

def require_beta(beta):
    if not beta >= 0:
        raise ValueError(f"beta, an inverse temperature, must be >= 0, not {beta}")


def attend(y, value, beta, causal=False, eager=False):
    """softmax(beta y y^T) value. (..., n, d), (..., n, d_v) -> (..., n, d_v).

    eager spells the softmax out: fused kernels have no forward-mode derivative, and none of second order. ValueError for
    beta < 0, where lambda_max may be above 1.
    """
    require_beta(beta)
    if not eager:
        scale = max(beta, 1e-30)  # a kernel multiplies the mask's -inf by it
        return F.scaled_dot_product_attention(y, y, value, is_causal=causal, scale=scale)
    logits = beta * wide(y) @ wide(y).mT
    if causal:
        logits = logits.masked_fill(torch.ones_like(logits, dtype=torch.bool).triu(1), -torch.inf)
    return logits.softmax(-1).to(value.dtype) @ value


def attention_matrix(x, beta, causal=False, base=10000.0):
    """A = softmax(beta S), rows summing to 1, for unit rows x. (..., n, d) -> (..., n, n), in x's dtype."""
    n = x.shape[-2]
    return attend(rope(x, base=base), torch.eye(n, device=x.device, dtype=x.dtype).expand(*x.shape[:-2], n, n),
                  beta, causal, eager=True)


def consensus_step(x, eta, beta, causal=False, base=10000.0, eager=False):
    """One step x <- normalize(x + eta (m - (x^T m) x)), m = A x. x: (..., n, d), unit rows; eta broadcasts to it."""
    y = rope(x, base=base)
    m = attend(y, x, beta, causal, eager)
    return unit(x + eta * tangent(x, m))


def mixing_floor(beta, n):
    """exp(-2 beta)/n: no entry of A is smaller for unit rows. Under a causal mask put i + 1 for n in row i."""
    require_beta(beta)
    return math.exp(-2 * beta) / n


# ----------------------------------------------------------------------------------- spectrum and step size

def symmetrized(x, beta, base=10000.0):
    """Pi^(1/2) A Pi^(-1/2) = D_Z^(-1/2) W D_Z^(-1/2), W = exp(beta S): symmetric, with A's eigenvalues. No mask.

    Dense, (..., n, n): for small n and for tests.
    """
    W = (beta * (scores(x, base) - 1)).exp()  # the constant cancels; S <= 1, so nothing overflows at any beta
    z = W.sum(-1).rsqrt()
    return z[..., :, None] * W * z[..., None, :]


def lanczos(matvec, start, iters, enough=None):
    """Largest (algebraic) eigenvalue of a symmetric operator, by Lanczos with full reorthogonalisation.

    In floating point the basis loses orthogonality as soon as a Ritz value converges, and copies of that value appear;
    so each new vector is orthogonalised against all earlier ones, twice. Failure mode that remains: a start vector
    without a part in the wanted eigenvector, so give a random one. Leading axes are independent problems.
    matvec: (..., n) -> (..., n); start: (..., n). enough(steps, theta, residual) -> bool is asked at every fourth step, from
    the eighth on, and ends the iteration early: a random vector has n^(-1/2) of the wanted mode, which must grow to be seen.
    Returns theta (...) and residual ||M u - theta u|| (...): some eigenvalue lies within residual of theta, and
    theta <= lambda_max up to rounding.
    """
    eps = 10 * torch.finfo(start.dtype).eps
    iters = min(iters, start.shape[-1])
    basis = start.new_zeros(*start.shape[:-1], iters, start.shape[-1])
    alphas, offs = [], []
    q = unit(start, eps)
    alive, scale = True, 0  # scale: size of the operator so far, for the breakdown test
    for m in range(1, iters + 1):
        w = matvec(q)
        basis[..., m - 1, :] = q
        Q = basis[..., :m, :]
        h = w[..., None, :] @ Q.mT
        w = w - (h @ Q)[..., 0, :]
        alpha = h[..., 0, -1:]  # q^T M q
        alphas.append(torch.where(alive, alpha, alphas[0]) if alphas else alpha)
        w = w - (w[..., None, :] @ Q.mT @ Q)[..., 0, :]
        b = w.norm(dim=-1, keepdim=True)
        scale = torch.maximum(alpha.abs(), b).clamp_min(scale)
        alive = b > eps * scale  # else the space is invariant: the eigenvalue is exact and the basis stops
        q = torch.where(alive, w / b, 0)
        offs.append(torch.where(alive, b, 0))
        if m == iters or enough and m >= 8 and m % 4 == 0:
            off = torch.cat(offs, -1)
            T = torch.diag_embed(torch.cat(alphas, -1))
            T = T + torch.diag_embed(off[..., :-1], 1) + torch.diag_embed(off[..., :-1], -1)
            theta, s = (found.to(T.device) for found in torch.linalg.eigh(T.cpu()))  # small, and not on every device
            # residual = b_m |last entry of the Ritz vector|
            theta, residual = theta[..., -1], (off[..., -1] * s[..., -1, -1]).abs()
            if m == iters or enough(m, theta, residual):
                return theta, residual


@torch.no_grad()
def lambda_max(x, beta, causal=False, iters=64, generator=None, base=10000.0):
    """Largest eigenvalue of I - A off the consensus direction: eta_c = 2/lambda_max.

    x: (..., n, d), unit rows. Returns (value, residual, converged), each (...).
    Without a mask: Lanczos on I - D^(-1/2) W D^(-1/2), at most `iters` steps, unless one product with W already shows
    that lambda_max is within 0.1% of 1; memory n x (iters + min(n, 4096)). value is a Ritz value, so it may be too small,
    by residual at most once the wanted mode is found; the safe bound is min(value + residual, 1), after 64 steps too low
    by 0.5% at worst in 157,000 random problems. converged: value is within 0.1% of lambda_max, by a residual of 0.03%
    at most, or since lambda_max <= 1; up to rounding, 10 eps; with iters < 32, where the mode found may be the next one, wrong
    in 1 of 600 random problems. Causal: 1 - min_i A_ii, exact, residual 0. One token,
    or A = I: value 0. ValueError for beta < 0.
    """
    require_beta(beta)
    if torch.is_autocast_enabled(x.device.type):  # 16 bits are not enough
        with torch.autocast(x.device.type, enabled=False):
            return lambda_max(x, beta, causal, iters, generator, base)
    y = wide(rope(x, base=base))
    n, batch = y.shape[-2], y.shape[:-2].numel()
    if n < 2:  # nothing can disagree
        value = y.new_zeros(y.shape[:-2])
        return value, value, torch.ones_like(value, dtype=torch.bool)
    side = max(1, math.isqrt(BLOCK // max(1, batch)))
    pieces = [slice(i, min(i + side, n)) for i in range(0, n, side)]
    scaled = beta * y

    def tiles():  # rows, columns >= rows, and these of W = exp(beta (S - 1)): symmetric, and S <= 1, so nothing overflows
        for i, rows in enumerate(pieces):
            for columns in pieces[i:]:
                yield rows, columns, (scaled[..., rows, :] @ y[..., columns, :].mT).sub_(beta).exp_()

    own = (beta * ((y * y).sum(-1) - 1)).exp()  # W_ii, 1 for unit rows
    if causal:
        # A_ii = W_ii / sum_{j<=i} W_ij; row i of W is its column i
        total = torch.zeros_like(own)
        for rows, columns, W in tiles():
            total[..., columns] += (W.triu_() if rows == columns else W).sum(-2)
        value = 1 - (own / total).amin(-1).clamp(max=1)  # W_ii was rounded twice: A_ii can come out above 1
        return value, torch.zeros_like(value), value.isfinite()
    kept = list(tiles()) if batch * n * n <= DENSE_LIMIT else None

    def apply(v):  # W v, rows (..., 1, n), from the left: batches of matrices times columns are slow on a CPU
        out = torch.zeros_like(v)
        for rows, columns, W in kept or tiles():
            out[..., rows] += v[..., columns] @ W.mT
            if rows != columns:
                out[..., columns] += v[..., rows] @ W
        return out

    def within(share, value, error):
        return error <= share * value + 10 * torch.finfo(y.dtype).eps

    own = own[..., None, :]
    Z = apply(torch.ones_like(own))
    # lambda_max is between 1 and I - A's Rayleigh quotient at one token against all, e_i without its consensus part:
    # 1 - (A_ii - pi_i)/(1 - pi_i), A_ii = W_ii/Z_i, pi = Z/sum Z. With many tokens this often is all that is needed
    pi = Z / Z.sum(-1, keepdim=True)
    value = 1 - ((own / Z - pi) / (1 - pi)).amin(-1).clamp(min=0)
    residual = 1 - value
    if not within(1e-3, value, residual).all():
        root = Z.sqrt()  # the consensus vector of the symmetrised A: I - A has eigenvalue 0 there, its smallest
        generator = generator or torch.Generator(y.device).manual_seed(0)
        start = torch.randn(Z.shape, generator=generator, device=y.device, dtype=y.dtype)

        def enough(steps, value, residual):
            # A start with little of the wanted mode first settles on the next one: a residual of 1e-3 after 8 steps is
            # wrong by more than that in 1 of 90 random problems, of 3e-4 after 32 steps in 1 of 3,000. 1 - value can't be.
            near = within(1e-3, value, 1 - value)
            return bool((near | within(3e-4, value, residual) if steps >= 32 else near).all())
        value, residual = lanczos(lambda v: v - apply(v / root) / root, start, iters, enough)
        value = value.clamp(0, 1)
    done = within(1e-3, value, 1 - value) | within(3e-4, value, residual)
    return value[..., 0], residual[..., 0], done[..., 0]


def eta_critical(x, beta, causal=False, base=10000.0):
    """eta_c = 2/lambda_max (...): the step size at which consensus turns unstable; inf where nothing can disagree.

    lambda_max is taken at its safe bound, min(value + residual, 1), since too small a value would permit too much; see
    there how often that bound is too low.
    """
    value, residual, _ = lambda_max(x, beta, causal, base=base)
    return 2 / (value + residual).clamp(max=1)


def clip_eta(eta, lam, safety=0.9):
    """min(eta, safety * 2/lambda_max), elementwise, as a tensor."""
    limit = 2 * safety / torch.as_tensor(lam, dtype=None if torch.is_tensor(lam) else torch.float64)
    return torch.minimum(torch.as_tensor(eta, dtype=limit.dtype, device=limit.device), limit)


def local_multiplier(update, x, iters=64, generator=None):
    """Growth per application of the fastest disagreement mode of any token update, linearised at x.

    The leading eigenvalue's modulus of P J P: J is update's Jacobian at x, P removes the token mean, by Arnoldi with
    forward-mode derivatives (so update needs eager attention). Where all tokens are equal and update keeps them so,
    these are exactly the eigenvalues of J off the consensus directions: above 1, disagreement grows. Elsewhere it is
    the growth of one application in the frame of x. Value projections, MLPs, norms and masks may be inside update.
    update: (..., n, d) -> (..., n, d); x: (..., n, d). Returns 0-dim tensors (value, residual, converged): residual
    is ||P J P u - theta u||, u unit; J need not be normal, so it does not bound theta's error. A complex pair is
    followed as well as a real value. converged: residual <= 0.1% of value.
    """
    def project(v):
        return v - v.mean(-2, keepdim=True)

    def apply(v):
        return project(torch.func.jvp(update, (x,), (v.view_as(x),))[1]).flatten()

    x = x.contiguous()  # equal tokens often come as an expanded view, which has no room for tangents
    eps = 10 * torch.finfo(x.dtype).eps
    iters = min(iters, x.numel())
    H = x.new_zeros(iters + 1, iters)
    Q = x.new_zeros(iters + 1, x.numel())
    generator = generator or torch.Generator(x.device).manual_seed(0)
    Q[0] = unit(project(torch.randn(x.shape, generator=generator, device=x.device, dtype=x.dtype)).flatten(), eps)
    for k in range(iters):
        w = apply(Q[k])
        for _ in range(2):  # Gram-Schmidt twice
            h = Q[:k + 1] @ w
            H[:k + 1, k] += h
            w = w - h @ Q[:k + 1]
        H[k + 1, k] = w.norm()
        if H[k + 1, k] <= eps * H[:k + 2, :k + 1].abs().amax() or k + 1 == iters:
            break
        Q[k + 1] = w / H[k + 1, k]
    H = H.cpu()  # small, and eig is not on every device
    theta, vectors = torch.linalg.eig(H[:k + 1, :k + 1])
    lead = theta.abs().argmax()
    u = vectors[:, lead]
    value, residual = theta[lead].abs(), H[k + 1, k] * u[-1].abs() / u.norm()
    return value, residual, residual <= 1e-3 * value + eps


# ---------------------------------------------------------------------------------------------- the module

class ConsensusAttention(nn.Module):
    """One attention update on a product of unit spheres, one sphere per head: (..., n, dim) -> (..., n, dim).

    dim, heads: dim = heads * d_head, d_head even. eta: first step size, one learnable value per channel. beta: inverse
    temperature. value: keep value and output projections. qk: one projection shared by query and key, normalised per
    head, so that |S| <= 1, the floor and reversibility still hold; without it queries and keys are the state itself.
    control_every=K: each K-th training forward runs `control` first (a graph break under torch.compile: there, leave
    it None and call `control(x)` from the training loop; a checkpoint does not keep the count). safety: the fraction of
    eta_c that is allowed.
    eta_c is exact for the bare block; with projections or an eta that differs between channels it is a guide (the
    largest eta of a head is the one that is compared), and `local_multiplier` gives the truth.
    """

    def __init__(self, dim, heads=1, eta=1.0, beta=1.0, causal=False, value=False, qk=False,
                 control_every=None, safety=0.9):
        super().__init__()
        if heads < 1 or dim % heads or (dim // heads) % 2:
            raise ValueError(f"dim {dim} must be heads ({heads}) times an even head size, for RoPE's pairs")
        if control_every is not None and (control_every < 0 or control_every % 1):
            raise ValueError(f"control_every must be a whole number of forwards, or None, not {control_every}")
        for name, number in (("eta", eta), ("beta", beta), ("safety", safety)):
            if not (math.isfinite(number) and number >= 0):
                raise ValueError(f"{name} must be a finite number >= 0, not {number}")
        if safety == 0:
            raise ValueError("safety must be above 0: it is the fraction of eta_c that is left")
        self.heads, self.beta, self.causal, self.safety = heads, float(beta), causal, safety
        self.value, self.qk, self.control_every, self.calls = value, qk, control_every, 0
        self.eta = nn.Parameter(torch.full((dim,), float(eta)))
        # in: query-key and value projections in one matmul; std d^(-1/2) keeps a unit state near unit per head
        self.proj_in = nn.Linear(dim, (qk + value) * dim, bias=False) if qk or value else None
        self.proj_out = nn.Linear(dim, dim, bias=False) if value else None
        for layer in filter(None, (self.proj_in, self.proj_out)):
            nn.init.normal_(layer.weight, std=dim ** -0.5)
        for name, start in (("lam", 1), ("eta_asked", eta), ("eta_used", eta)):  # what the last control saw and did, per head
            self.register_buffer(name, torch.full((heads,), float(start)))

    def query_value(self, x):
        """Of unit rows x (..., n, heads, d_head): the rows that are compared, unit too, and those that are averaged."""
        if self.proj_in is None:
            return x, x
        parts = self.proj_in(x.flatten(-2)).chunk(self.qk + self.value, -1)
        parts = [part.unflatten(-1, x.shape[-2:]) for part in parts]
        return unit(parts[0]) if self.qk else x, parts[-1] if self.value else x

    def extra_repr(self):
        return f"dim={self.eta.numel()}, heads={self.heads}, beta={self.beta}, causal={self.causal}"

    def forward(self, x, eager=False):
        if x.shape[-1] != self.eta.numel():
            raise ValueError(f"built for dim = {self.eta.numel()}, but the tokens have {x.shape[-1]}")
        if self.control_every and self.training:
            control = self.count_and_control
            # not as a decorator: that would import the compiler, 2 seconds, where nothing is compiled
            (torch.compiler.disable(control) if torch.compiler.is_compiling() else control)(x)
        rows = unit(x.unflatten(-1, (self.heads, -1)))
        tables = rope_tables(torch.arange(x.shape[-2], device=x.device), rows.shape[-1], dtype=wide(x).dtype)
        return self.step(rows, tables, eager).flatten(-2)

    def step(self, x, tables, eager=False):
        """forward on rows x (..., n, heads, d_head) that are unit already; tables: rope_tables, one for all layers."""
        q, v = self.query_value(x)
        y = rotate(q.transpose(-2, -3), *tables)  # (..., heads, n, d_head); m_i = sum_j A_ij v_j
        m = attend(y, v.transpose(-2, -3).to(y.dtype), self.beta, self.causal, eager).transpose(-2, -3)
        if self.proj_out is not None:
            m = self.proj_out(m.flatten(-2)).unflatten(-1, x.shape[-2:])
        eta = self.eta.clone().view(x.shape[-2:])  # of this call: a later one may clip the parameter before the backward
        # x <- normalize(x + eta (m - (x^T m) x))
        return unit(torch.addcmul(x, eta, tangent(x, m.to(x.dtype)))).to(x.dtype)

    def count_and_control(self, x):
        if torch._C._current_graph_task_id() != -1:  # activation checkpointing runs this forward again inside backward()
            return
        self.calls += 1
        if self.calls % self.control_every == 0:
            self.control(x)

    @torch.no_grad()
    def control(self, x, act=True):
        """eta <- min(eta, safety * 2/lambda_max) per head, at the state x (..., n, dim). act=False only measures.

        lambda_max is the largest over the leading axes, at its safe bound. Without a mask lambda_max <= 1, so where no eta
        is above 2 safety nothing is clipped: then that bound, 1, stands for it, and Lanczos is not run. With data parallel
        all ranks must call it, and clip alike. Recorded per head in the buffers lam, eta_asked and eta_used (the largest
        step size of the head before and after).
        """
        if act and not self.causal and self.eta.amax() <= 2 * self.safety:
            lam = torch.ones_like(self.lam)
        else:
            with torch.autocast(x.device.type, enabled=False):
                q, _ = self.query_value(unit(x.to(self.eta.dtype).unflatten(-1, (self.heads, -1))))
                # acting, 16 steps: their bound was low by 6% at worst in 157,000 problems, and safety leaves 10%
                value, residual, _ = lambda_max(q.transpose(-2, -3), self.beta, self.causal, iters=16 if act else 64)
            # tokens that are not finite leave eta at its safe value, and not lost
            lam = (value + residual).nan_to_num(nan=1).clamp(max=1).reshape(-1, self.heads)
            lam = torch.cat((lam, lam.new_zeros(1, self.heads))).amax(0)  # of an empty batch too, which has a largest then
            if act and torch.distributed.is_available() and torch.distributed.is_initialized():
                torch.distributed.all_reduce(lam, torch.distributed.ReduceOp.MAX)  # each rank sees a part of the batch
        eta = self.eta.view(self.heads, -1)
        self.lam.copy_(lam)
        self.eta_asked.copy_(eta.amax(-1))
        if act:
            eta.copy_(clip_eta(eta, lam[:, None], self.safety))
        self.eta_used.copy_(eta.amax(-1))


# ------------------------------------------------------------------------------------------------ the demo

@torch.no_grad()
def growth(x, etas, beta, causal=False, steps=200, size=1e-6):
    """Growth per step of a small disagreement around consensus, for each eta (E,): simulation, no linear algebra.

    x: (n, d) equal unit rows, float64. After every step the tokens are pulled back to distance `size` from their mean,
    so the run stays in the linear regime however long it is. Returns the mean growth over its second half, (E,).
    """
    generator = torch.Generator().manual_seed(0)
    state = unit(x + size * torch.randn(x.shape, generator=generator, dtype=x.dtype)).expand(len(etas), *x.shape)
    log_growth = []
    for _ in range(steps):
        before = (state - state.mean(-2, keepdim=True)).norm(dim=(-2, -1))
        state = consensus_step(state, etas[:, None, None], beta, causal)
        centre = state.mean(-2, keepdim=True)
        after = (state - centre).norm(dim=(-2, -1))
        log_growth.append((after / before).log())
        state = unit(centre + (state - centre) * (size / after)[:, None, None])
    return torch.stack(log_growth[steps // 2:]).mean(0).exp()


def agreed(n, d=16, seed=0):
    """Equal random unit rows (n, d), float64."""
    return unit(torch.randn(d, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)).expand(n, d)


def step_norm(A, eta):
    """||P (I - eta (I - A)) P||_2, P = I - 1 1^T/n: the most that one step at consensus enlarges a disagreement.

    A: (n, n). At eta_c the eigenvalues are at most 1 in modulus, and so is this norm if A is normal; else it may be above."""
    P = torch.eye(len(A), dtype=A.dtype, device=A.device) - 1 / len(A)
    return torch.linalg.matrix_norm(P @ (P - eta * (P - A @ P)), 2)


def measure_threshold(beta, n, d=16, causal=False, seed=0, steps=200):
    """(eta_c, observed): 2/lambda_max, and the step size at which the simulated disagreement begins to grow.

    The bracket [0.5, 16] is cut into 8 three times, and growth - 1 interpolated linearly in the last piece.
    """
    x = agreed(n, d, seed)
    eta_c, low, high = eta_critical(x, beta, causal).item(), 0.5, 16.0
    for _ in range(3):
        etas = torch.linspace(low, high, 9, dtype=x.dtype)
        g = growth(x, etas, beta, causal, steps)
        k = int((g > 1).to(torch.int).argmax())  # the first that grows
        if k == 0:
            return eta_c, math.nan  # no boundary inside the bracket
        low, high = etas[k - 1].item(), etas[k].item()
    return eta_c, low + (high - low) * ((1 - g[k - 1]) / (g[k] - g[k - 1])).item()


def two_clusters(n, d, first):
    """Unit tokens (n, d) whose rotated rows are u for the first few and -u for the others.

    Halves mix nearly the slowest; one against all others nearly attains the floor. u lies in the slowest plane of RoPE,
    so the unrotated rows are close to +-u too.
    """
    y = torch.zeros(n, d, dtype=torch.float64)
    y[:first, d // 2 - 1], y[first:, d // 2 - 1] = 1, -1
    return rope(y, positions=-torch.arange(n))


def over_floor(beta, causal, n=64, d=16):
    """The smallest A_ij over its floor, of random tokens and of one token against all others. Never below 1."""
    x = unit(torch.randn(n, d, generator=torch.Generator().manual_seed(0), dtype=torch.float64))
    seen = torch.arange(1, n + 1)[:, None] if causal else n
    entries = torch.stack([attention_matrix(tokens, beta, causal) for tokens in (x, two_clusters(n, d, 1))])
    return (entries * seen * math.exp(2 * beta))[entries > 0].amin().item()


def noted_lanczos(beta, causal, n=64, d=16):
    """(Lanczos on I - Pi^(1/2) A Pi^(-1/2), the note's form without a mask, the largest eigenvalue of I - A by LAPACK)."""
    generator = torch.Generator().manual_seed(0)
    x = unit(torch.randn(n, d, generator=generator, dtype=torch.float64))
    A, W = attention_matrix(x, beta, causal), (beta * scores(x)).exp()
    root = (W.tril() if causal else W).sum(-1).sqrt()  # Pi^(1/2), the consensus vector where A is reversible
    phi = unit(root)
    deflate = lambda v: v - phi * (phi @ v)
    start = deflate(torch.randn(n, generator=generator, dtype=x.dtype))
    theta, _ = lanczos(lambda v: deflate(v - root * (A @ (v / root))), start, n - 1)
    return theta.item(), 1 - torch.linalg.eigvals(A).real.amin().item()


def contraction(beta, n=64, d=16, steps=20, seeds=5):
    """Idealised averaging x <- A(x) x: Euclidean diameters (seeds + 1, steps + 1), the last row from two clusters."""
    x = unit(torch.randn(seeds, n, d, generator=torch.Generator().manual_seed(0), dtype=torch.float64))
    x = torch.cat((x, two_clusters(n, d, n // 2)[None]))
    diameters = []
    for _ in range(steps + 1):
        diameters.append(torch.cdist(x, x, compute_mode="donot_use_mm_for_euclid_dist").amax((-2, -1)))
        x = attention_matrix(x, beta) @ x
    return torch.stack(diameters, 1)


def main():
    import argparse
    import json
    import pathlib
    import sys

    parser = argparse.ArgumentParser(description="eta_c against the measured threshold, and contraction to consensus",
                                     allow_abbrev=False)
    parser.error = lambda message: parser.exit(2, f"error: {message} (see --help)\n")  # one line, without the usage
    parser.add_argument("--out", help="folder for results.json and threshold.png (default: results/rope_consensus, and "
                        "-quick after it)")
    parser.add_argument("--quick", action="store_true", help="two thresholds and two contractions alone: 3 seconds")
    args = parser.parse_args()
    out = pathlib.Path("results/rope_consensus" + "-quick" * args.quick if args.out is None else args.out)
    cases = [(False, 64, 200, (0.5, 1, 2, 4, 8)), (False, 256, 100, (1, 4)), (True, 32, 200, (0.5, 2, 8)),
             (True, 32, 2000, (0.5, 2, 8))]
    betas, drawn = (0.25, 0.5, 1, 2, 4), (0.5, 1, 2)
    if args.quick:
        cases, betas, drawn = [(False, 64, 200, (1,)), (True, 32, 200, (8,))], (0.5, 4), (0.5,)

    def refuse(reason):
        print(f"error: cannot write to {out}: {reason}; choose another folder with --out", file=sys.stderr)
        sys.exit(2)

    if args.out == "":
        refuse("the name is empty")  # as an unset variable of the shell is; it would be the current folder
    try:
        out.mkdir(parents=True, exist_ok=True)
        (out / "results.json.tmp").touch()  # now, rather than after the work
        (out / "results.json.tmp").unlink()
    except OSError as error:
        refuse(error.strerror)

    toy = []
    print("step size at which a small disagreement starts to grow (float64, d = 16); growth: the most in one step at eta_c\n"
          f"{'mask':>7} {'beta':>5} {'n':>4} {'steps':>5} {'eta_c':>8} {'measured':>8} {'difference':>10} {'growth':>8}")
    for causal, n, steps, some_betas in cases:
        for beta in some_betas:
            eta_c, observed = measure_threshold(beta, n, causal=causal, steps=steps)
            toy.append(dict(causal=causal, beta=beta, n=n, steps=steps, eta_c=eta_c, eta_observed=observed,
                            rel_error=observed / eta_c - 1,
                            growth=step_norm(attention_matrix(agreed(n), beta, causal), eta_c).item()))
            print(f"{'causal' if causal else 'none':>7} {beta:5g} {n:4d} {steps:5d} {eta_c:8.4f} {observed:8.4f} "
                  f"{toy[-1]['rel_error']:10.2%} {toy[-1]['growth']:8.4f}")
    print("Under the causal mask A is not normal: disagreement grows for a while below eta_c, so short runs cross early.")

    rows, curves = [], {}
    print("\ncontraction of the diameter by averaging, n = 64, d = 16: the worst factor of 20 steps, from 5 random starts\n"
          "and from two opposite clusters, whose Dobrushin coefficient tau is tanh(beta)\n"
          f"{'beta':>5} {'1-e^(-2 beta)':>13} {'worst factor':>12} {'1-tau':>9} {'e^(-2 beta)':>11}")
    for beta in betas:
        curves[beta] = contraction(beta)
        A = attention_matrix(two_clusters(64, 16, 32), beta)
        tau = (torch.cdist(A, A, p=1).amax() / 2).item()  # Dobrushin's coefficient; here tanh(beta)
        factors = (curves[beta][:, 1:] / curves[beta][:, :-1])[curves[beta][:, 1:] > 1e-12]  # above rounding
        rows.append(dict(beta=beta, bound=1 - math.exp(-2 * beta), two_cluster_gap=1 - tau,
                         worst_factor=factors.max().item()))
        print(f"{beta:5g} {rows[-1]['bound']:13.4f} {rows[-1]['worst_factor']:12.4f} {1 - tau:9.6f} "
              f"{math.exp(-2 * beta):11.6f}")
    exact = []
    print("\nn = 64, d = 16: the smallest A_ij over its floor, and lambda_max by Lanczos on the symmetrised matrix, the\n"
          "note's form without a mask, against LAPACK on I - A\n"
          f"{'mask':>7} {'beta':>5} {'A over floor':>12} {'Lanczos':>8} {'LAPACK':>8}")
    for causal in (False, True):
        for beta in betas:
            theta, value = noted_lanczos(beta, causal)
            exact.append(dict(causal=causal, beta=beta, over_floor=over_floor(beta, causal), lanczos=theta, exact=value))
            print(f"{'causal' if causal else 'none':>7} {beta:5g} {exact[-1]['over_floor']:12.4f} {theta:8.4f} {value:8.4f}")
    results = dict(command=" ".join(["python", *sys.argv]), toy=toy, contraction=rows, exact=exact)

    from matplotlib.figure import Figure
    figure = Figure(figsize=(9, 3.6), layout="constrained")
    left, right = figure.subplots(1, 2)
    left.plot([2, 3], [2, 3], "k-", lw=1, label="theory: measured = eta_c")
    for causal, marker, label in ((False, "o", "no mask"), (True, "x", "causal, 2000 steps")):
        points = [t for t in toy if t["causal"] == causal and not (causal and t["steps"] < 2000)]
        left.plot([t["eta_c"] for t in points], [t["eta_observed"] for t in points], "k" + marker, mfc="none", label=label)
    left.set(xlabel="eta_c = 2/lambda_max (step size)", ylabel="measured threshold (step size)")
    left.legend()
    for beta, style, marker in zip(drawn, ("-", "--", ":"), "os^"):
        worst = (curves[beta] / curves[beta][:, :1]).amax(0)
        right.plot(worst, "k" + style, marker=marker, mfc="none", ms=4, label=f"beta = {beta:g}, measured")
        right.plot([(1 - math.exp(-2 * beta)) ** t for t in range(len(worst))], color="0.6", ls=style, label="bound")
    right.set(xlabel="averaging steps t", ylabel="diam(x_t) / diam(x_0)", yscale="log", ylim=(1e-4, 1.5))
    right.legend(fontsize=7, ncol=2)
    try:
        (out / "results.json.tmp").write_text(json.dumps(results, indent=1))
        figure.savefig(out / "threshold.png.tmp", dpi=110, format="png")
        for name in ("results.json", "threshold.png"):  # both are whole by now
            (out / f"{name}.tmp").replace(out / name)
    except OSError as error:
        refuse(error.strerror)
    print(f"\nwrote {out / 'results.json'} and {out / 'threshold.png'}")


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        raise SystemExit(130) from None
