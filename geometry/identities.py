r"""Thirteen equations of the paper's theory, each computed both ways: exact, true under a condition, or false?

     6  Dρ(x) v = √d/√(‖x‖²+ε) (v − x⟨x,v⟩/(‖x‖²+ε))              Jacobian of the norm ρ(x) = √d x/√(‖x‖²+ε)
     7  ρ⁻¹(y) = y √(ε/(d − ‖y‖²))
    16  ‖DF‖ ≤ √(d/ε) ‖W_V‖ (1 + 2 d ‖W_Q‖ ‖W_K‖)                 Lipschitz bound of norm followed by attention
    18  P(N random points lie in one half-space) = 2^(1−N) Σ_{k<d} C(N−1, k)               Wendel
    24  R* = σ √((d−1)/2λ)          25  P(R) ∝ R^(d−1) exp(−λR²/σ²)    radius under dk = −λk dt + σ dW
    36  σ_min²(W_Q) ‖W_K‖_F² ≤ ‖W_Qᵀ U W_K‖_F² ≤ σ_max²(W_Q) ‖W_K‖_F²
    40  E_0 = E_bulk + ln(N−1)/β + ln(c/(1−c))/β                  depth of a sink of mass c
    47  N < 1 + (1−c)/c · exp(κ √d_eff ‖W_Q‖‖W_K‖ − κ² σ_E²/(2 d_eff)),   β = κ/√d_eff
    53  J Kᵀ − K J = −[S, J] − {A, J},  K = S + A           vorticity of FFN after norm
    59  exact flow − Trotter = h²/2 (∂T + ∂R + DT[T] + DR[R] − [T,R]) + O(h³),  [T,R] = DR[T] − DT[R]
    74  gauge dimension  Σ_heads ½ d_h(d_h−1) + d_h/2
    77  ⟨W, AW⟩_F = 0 for skew A

    symbol        variable          shape
    x, Ψ          x                 (d,) one token, (n, d) a sequence
    ε, λ, σ, κ    eps, lam, sigma   scalars; ε is added to ‖x‖², so a library's eps (added to the mean) is ε/d
    W_Q, W_K, W_V wq, wk, wv        (d_h, d)
    U             rot               (d_h, d_h) orthogonal: the RoPE rotation
    J, K, S, A    jac, k, s, a      (d, d)

A check measures the error of the equation as printed ("inside": where the paper's own premises hold) and of one
counterexample. Verdict, computed:
    inside error > tolerance    does not hold
    scope "condition"           holds under a stated condition: of weights, data or noise, which may fail
    scope "algebra"             holds trivially (algebra): a condition only says how the equation is to be read
The scope is set by hand. The paper itself states the conditions of Eqs. 16, 18, 24, 25 and 74; those of 6 and 7 are about norms
of libraries, with a gain and an epsilon of their own. Under "algebra" the counterexample is an altered equation: it shows that
the check can fail. A check that can not reject its counterexample is reported as "not decided".
Source: the paper's Sections II to V, equation numbers as above.

    python geometry/identities.py            # about 5 seconds on two CPU cores; no model
    python geometry/identities.py --quick    # fewer random instances
"""
from itertools import product
from types import SimpleNamespace

import numpy as np
import torch
from scipy import integrate, optimize, stats
from torch.func import jacrev

import models

TRIVIAL, CONDITION, FALSE, OPEN = (
    "holds trivially (algebra)", "holds under a stated condition", "does not hold", "not decided")


def decide(check):
    """Verdict of one check from its two errors, by the rule in the header."""
    if not check["outside"] > check["tol"]:
        return OPEN
    if check["inside"] > check["tol"]:
        return FALSE
    return {"condition": CONDITION, "algebra": TRIVIAL}[check["scope"]]


def rms_ball(x, eps):
    """rho(x) = sqrt(d) x / sqrt(|x|^2 + eps), rows of x: (..., d) -> (..., d), inside the ball of radius sqrt(d)."""
    return x * (x.shape[-1] / (x.square().sum(-1, keepdim=True) + eps)).sqrt()


def rms_jacobian(x, eps):
    """Eq. 6 as a matrix: sqrt(d)/sqrt(|x|^2+eps) (I - x x^T/(|x|^2+eps)); x: (d,) -> (d, d), symmetric."""
    s = x @ x + eps
    return (len(x) / s).sqrt() * (torch.eye(len(x), dtype=x.dtype) - torch.outer(x, x) / s)


def relative(a, b):
    return float((a - b).norm() / b.norm())


def normal(rng, *shape):
    return torch.from_numpy(rng.standard_normal(shape))


def opnorm(w):
    return float(torch.linalg.matrix_norm(w, 2))


def rotation(rng, d):
    return torch.linalg.qr(normal(rng, d, d))[0]


# ---------------------------------------------------------------- Section II: the norm and the attention field

def eq6(rng, trials):
    d, eps, inside, outside = 16, 1e-3, 0.0, 0.0
    for scale in np.repeat([1e-3, 1e-1, 1.0, 1e2], trials):
        x = normal(rng, d) * scale
        exact = jacrev(lambda v: rms_ball(v, eps))(x)
        inside = max(inside, relative(rms_jacobian(x, eps), exact))
        # a library writes x/sqrt(mean(x^2) + eps): reading its eps as the paper's epsilon is off by the factor d
        library = jacrev(lambda v: v / (v.square().mean() + eps).sqrt())(x)
        outside = max(outside, relative(rms_jacobian(x, eps), library))
        inside = max(inside, relative(rms_jacobian(x, d * eps), library))
    return dict(
        claim="Jacobian of the norm", inside=inside, outside=outside, tol=1e-10, scope="condition",
        condition="epsilon = d * (the library's eps), and unit gains",
        counterexample="eps = 1e-3 of a library read as the paper's epsilon: off by up to sqrt(d) near the origin")


def eq7(rng, trials):
    d, eps, inside = 16, 1e-3, 0.0
    inverse = lambda y, eps: y * (eps / (d - y.square().sum(-1, keepdim=True))).sqrt()
    x = normal(rng, 50 * trials, d) * torch.logspace(-3, 1, 50 * trials, dtype=torch.float64)[:, None]
    inside = relative(inverse(rms_ball(x, eps), eps), x)
    # a gain with a zero entry: two inputs that differ only there can have the same image, so no inverse exists
    gain = torch.ones(d, dtype=x.dtype)
    gain[0] = 0
    outside = relative(inverse(gain * rms_ball(x, eps), eps), x)
    lost = {}
    for rms in (1.0, 10.0, 100.0):  # d - |y|^2 = d eps/(|x|^2 + eps) must survive rounding
        z = torch.from_numpy(rng.standard_normal((200, d)).astype(np.float32))
        z = z * rms * d ** 0.5 / z.norm(dim=-1, keepdim=True)
        back = inverse(rms_ball(z, 1e-5 * d).double(), 1e-5 * d)
        lost[f"token RMS {rms:g}"] = float((back.norm(dim=-1) / z.norm(dim=-1) - 1).abs().nan_to_num(1.0).median())
    return dict(
        claim="closed inverse, so the norm is a diffeomorphism onto the open ball", inside=inside, outside=outside,
        tol=1e-8, scope="condition", condition="no gain is zero, and exact arithmetic",
        counterexample="one zero gain: the map is not injective",
        note="median relative error of the radius recovered from a float32 output at a library eps of 1e-5: "
        + ", ".join(f"{k}: {v:.1g}" for k, v in lost.items()), float32_radius_error=lost)


def attention_field(x, wq, wk, wv, eps, beta, causal=True):
    """F of Eq. 8 without positions: x (n, d) -> (n, d_v)."""
    y = rms_ball(x, eps)
    energy = beta * (y @ wq.T) @ (y @ wk.T).T
    if causal:
        n = len(x)
        energy = energy.masked_fill(torch.ones(n, n, dtype=torch.bool).triu(1), -torch.inf)
    return energy.softmax(-1) @ (y @ wv.T)


def sup_norm_bounds(jac):
    """Bracket of the operator norm from sup_token |h| to sup_token |F|; jac: (n, d_v, n, d).

    Above: max_i sum_j |J_ij|_op. Below: the image of h_j = the top right-singular vector of each block of the best row.
    """
    blocks = jac.permute(0, 2, 1, 3)
    upper = float(torch.linalg.matrix_norm(blocks, 2).sum(1).max())
    lower = 0.0
    for row in blocks:
        u = torch.linalg.svd(row.sum(0))[0][:, 0]
        for _ in range(30):  # alternate: best h_j for the output direction u, then the direction it reaches
            h = torch.einsum("jab,a->jb", row, u)
            h = h / h.norm(dim=-1, keepdim=True).clamp_min(1e-300)
            out = torch.einsum("jab,jb->a", row, h)
            u = out / out.norm().clamp_min(1e-300)
        lower = max(lower, float(out.norm()))
    return lower, upper


def eq16(rng, trials):
    d, eps = 6, 0.1
    bound = lambda wq, wk, wv: (d / eps) ** 0.5 * opnorm(wv) * (1 + 2 * d * opnorm(wq) * opnorm(wk))
    inside = tightest = 0.0
    for scale in np.repeat([0.05, 0.3, 1.0, 5.0], trials):
        wq, wk, wv = (normal(rng, d, d) / d ** 0.5 for _ in range(3))
        x = normal(rng, 8, d) * scale
        _, upper = sup_norm_bounds(jacrev(lambda v: attention_field(v, wq, wk, wv, eps, 1.0))(x))
        tightest = max(tightest, upper / bound(wq, wk, wv))
    # the worst case: one query token at the origin, the others in antipodal pairs, keys aligned with values
    eye, e = torch.eye(d, dtype=torch.float64), torch.zeros(d, dtype=torch.float64)
    e[0] = 1e4
    x = torch.stack([e * (-1) ** i for i in range(40)] + [e * 0])
    worst = {}
    for beta in (1 / d ** 0.5, 1.0, 4.0):
        jac = jacrev(lambda v: attention_field(torch.cat([x[:-1], v[None]]), eye, eye, eye, eps, beta)[-1])(x[-1])
        worst[beta] = opnorm(jac) / bound(eye, eye, eye)
    inside = max(0.0, tightest - 1, worst[1.0] - 1)
    # Euclidean norm over the whole sequence, W_Q = 0: F = (causal average) x, whose norm grows towards 2 with n
    wq = torch.zeros(d, d, dtype=torch.float64)
    zero = torch.zeros(64, d, dtype=torch.float64)
    flat = jacrev(lambda v: attention_field(v, wq, eye, eye, eps, 1.0))(zero).reshape(64 * d, 64 * d)
    euclid = opnorm(flat) / bound(wq, eye, eye)
    return dict(
        claim="global Lipschitz bound of norm and attention", inside=inside,
        outside=max(worst[4.0], euclid) - 1, tol=1e-9, scope="condition",
        condition="norm: largest token norm in, largest token norm out; inverse temperature beta <= 1",
        counterexample=f"beta = 4: norm {worst[4.0]:.2f} times the bound; Euclidean norm over a causal sequence of 64: "
        f"{euclid:.2f} times", ratio_to_bound_random=tightest, ratio_beta_1=worst[1.0], ratio_beta_4=worst[4.0],
        ratio_euclidean=euclid)


# ---------------------------------------------------------------- Sections II and III: probability

def in_half_space(x):
    """Whether all rows of x (N, d) lie in one open half-space: is there a w with x w >= 1?"""
    return optimize.linprog(np.zeros(x.shape[1]), A_ub=-x, b_ub=-np.ones(len(x)), bounds=(None, None)).status == 0


def half_space_patterns(x):
    """Number of sign vectors s for which all s_i x_i lie in one open half-space; x: (N, d)."""
    signs = product((1.0, -1.0), repeat=len(x) - 1)
    return 2 * sum(in_half_space(x * np.array((1.0, *s))[:, None]) for s in signs)  # s and -s together


def wendel(d, n):
    return float(stats.binom.cdf(d - 1, n - 1, 0.5))


def eq18(rng, trials):
    # Cover's count: for points in general position the fraction of realisable sign patterns equals P exactly, so a law
    # unchanged by independent sign flips has this P whatever its covariance
    inside = 0.0
    for d, n in ((2, 6), (3, 6), (4, 7)):
        x = rng.standard_normal((n, d)) @ np.diag(10.0 ** -np.arange(d) / 2)
        inside = max(inside, abs(half_space_patterns(x) / 2 ** n - wendel(d, n)))
    inside = max(inside, *(abs(wendel(d, 2 * d) - 0.5) for d in (2, 8, 64)))
    # tokens with a common mean ("the cone effect"): points drawn around a mean of 1.5 standard deviations
    d, n, hits, draws = 3, 12, 0, 200 * trials
    for _ in range(draws):
        a = rng.standard_normal((n, d)) + [1.5, 0, 0]
        hits += in_half_space(a)
    return dict(
        claim="Wendel's probability; P(d, 2d) = 1/2", inside=inside, outside=abs(hits / draws - wendel(d, n)), tol=1e-9,
        scope="condition", condition="each point as likely as its antipode, general position; covariance does not matter",
        counterexample=f"d = 3, N = 12, mean 1.5 sd: P = {hits / draws:.2f}, formula {wendel(d, n):.3f}")


def chi_radius(d, lam, sigma):
    """Stationary law of |k| for dk = -lam k dt + sigma dW: k ~ N(0, sigma^2/(2 lam) I)."""
    return stats.chi(d, scale=sigma / (2 * lam) ** 0.5)


def ou_radii(rng, d, lam, sigma, n, spread=None, steps=40, dt=0.25):
    """n radii of the Ornstein-Uhlenbeck process after `steps` exact steps of length dt, from k = 0."""
    s = sigma * (np.ones(d) if spread is None else spread)
    k = np.zeros((n, d))
    decay = np.exp(-lam * dt)
    for _ in range(steps):
        k = decay * k + s * np.sqrt((1 - decay ** 2) / (2 * lam)) * rng.standard_normal((n, d))
    return np.linalg.norm(k, axis=1)


def eq24(rng, trials):
    inside = 0.0
    for d, lam, sigma in ((2, 0.3, 1.0), (16, 1.0, 0.5), (128, 0.1, 2.0)):
        star = sigma * ((d - 1) / (2 * lam)) ** 0.5
        law = chi_radius(d, lam, sigma)
        mode = optimize.minimize_scalar(lambda r: -law.logpdf(r), bounds=(star / 3, star * 3), method="bounded",
                                        options=dict(xatol=1e-10)).x
        inside = max(inside, abs(mode / star - 1))
    # anisotropic noise of the same total power: the commonest radius moves away from R*
    d, spread = 16, np.sqrt(16 * np.eye(16)[0] * 0.9 + 0.1)
    spread *= np.sqrt(d / (spread ** 2).sum())
    r = ou_radii(rng, d, 1.0, 1.0, 4000 * trials, spread)
    counts, edges = np.histogram(r, 60)
    mode = edges[counts.argmax():][:2].mean()
    star = ((d - 1) / 2) ** 0.5
    return dict(
        claim="zero of the radial drift is the commonest radius", inside=inside, outside=abs(mode / star - 1), tol=1e-3,
        scope="condition", condition="isotropic noise",
        counterexample=f"noise with 90% of its power along one axis: mode {mode:.2f}, R* {star:.2f}; the paper holds "
        "that SGD noise is anisotropic")


def eq25(rng, trials):
    d, lam, sigma = 12, 0.4, 0.8
    law = chi_radius(d, lam, sigma)
    p = lambda r: r ** (d - 1) * np.exp(-lam * r ** 2 / sigma ** 2)
    total = integrate.quad(p, 0, np.inf)[0]
    r = np.linspace(0.3, 5, 200)
    inside = float(np.abs(p(r) / total / law.pdf(r) - 1).max())
    # zero probability current of the radial equation: drift P - (sigma^2/2) P' = 0 with P'/P from the density itself
    drift = sigma ** 2 * (d - 1) / (2 * r) - lam * r
    inside = max(inside, float(np.abs(drift - sigma ** 2 / 2 * ((d - 1) / r - 2 * lam * r / sigma ** 2)).max()))
    n = 4000 * trials
    ks = stats.kstest(ou_radii(rng, d, lam, sigma, n), law.cdf)
    uneven = stats.kstest(ou_radii(rng, d, lam, sigma, n, np.linspace(0.2, 1.8, d)), law.cdf)
    if ks.pvalue < 1e-3:  # the simulated process must agree too
        inside = max(inside, ks.statistic)
    return dict(
        claim="stationary radius has a chi law", inside=inside, outside=float(uneven.statistic), tol=1e-8,
        scope="condition", condition="isotropic noise, constant in time",
        counterexample=f"noise of unequal strength per axis: Kolmogorov distance {uneven.statistic:.3f}",
        note=f"simulated process against the law: distance {ks.statistic:.4f}, p = {ks.pvalue:.2f}")


def eq36(rng, trials):
    def violation(wq, wk, rot):
        s = torch.linalg.svdvals(wq)
        f, k = float((wq.T @ rot @ wk).square().sum()), float(wk.square().sum())
        return max(1 - f / (float(s[-1]) ** 2 * k), f / (float(s[0]) ** 2 * k) - 1)
    inside, spread = 0.0, []
    for d in np.repeat([16, 8, 64], 10 * trials):  # d_h = 8: square and wide W
        wq, wk = normal(rng, 8, d), normal(rng, 8, d) * torch.logspace(0, -2, 8, dtype=torch.float64)[:, None]
        inside = max(inside, violation(wq, wk, rotation(rng, 8)))
        spread.append(float((wq.T @ rotation(rng, 8) @ wk).norm() / (wq.T @ wk).norm()))
    # d_h > d: W_Q^T has a null space, and the smallest of its d singular values bounds nothing
    wq = torch.zeros(8, 4, dtype=torch.float64)
    wq[:4] = torch.eye(4)
    wk = torch.zeros(8, 4, dtype=torch.float64)
    wk[4:] = torch.eye(4)
    return dict(
        claim="energy variance bounded by singular values, whatever the rotation",
        inside=max(inside, 0.0), outside=violation(wq, wk, torch.eye(8, dtype=torch.float64)), tol=1e-10,
        scope="algebra",
        condition="orthogonal U; sigma_min over all d_h directions, hence 0 when d_h > d",
        counterexample="d_h = 8 > d = 4 with sigma_min read as the smallest of four: norm 0, lower bound 4",
        note=f"the bound does not depend on U but the norm does: {min(spread):.2f} to {max(spread):.2f} times its "
        "value at U = I")


def eq40(rng, trials):
    inside = outside = 0.0
    for n in (2, 10, 1000):
        for beta in (0.1, 1.0, 3.0):
            e = rng.standard_normal(n) * 3
            c = np.exp(beta * e[0]) / np.exp(beta * e).sum()
            bulk = np.log(np.exp(beta * e[1:]).mean()) / beta
            depth = lambda b: b + np.log(n - 1) / beta + np.log(c / (1 - c)) / beta
            inside = max(inside, abs(depth(bulk) - e[0]))
            outside = max(outside, abs(depth(e[1:].mean()) - e[0]))
    return dict(
        claim="depth of a sink that holds mass c", inside=inside, outside=outside, tol=1e-9, scope="algebra",
        condition="E_bulk is the log-mean-exp of the other energies: c is then c by definition",
        counterexample="E_bulk taken as the mean energy: off by up to "
        f"{outside:.1f}", note="that the depth must grow as ln N assumes a fixed c; nothing in the equation fixes c")


def context_bound(c, kappa, d_eff, norms, variance):
    """Eq. 47: N_max from sink mass c, kappa, effective dimension, |W_Q||W_K| and bulk variance."""
    return 1 + (1 - c) / c * np.exp(kappa * np.sqrt(d_eff) * norms - kappa ** 2 * variance / (2 * d_eff))


def eq47(rng, trials):
    # isotropic tokens of norm sqrt(d), as the bound assumes; W_Q = W_K with one strong direction, along query and sink
    d, n, worst, repaired, example = 64, 100, 0.0, 0.0, ""
    for strength in np.repeat([0.02, 0.05, 0.1], trials):
        s = np.r_[1.0, np.full(d - 1, strength)]
        d_eff = (s ** 2).sum()                                  # |W|_F^2/|W|_op^2, the same for both
        beta = 0.1
        x = rng.standard_normal((n, d))
        x *= np.sqrt(d) / np.linalg.norm(x, axis=1, keepdims=True)
        x[0] = np.sqrt(d) * np.eye(d)[0]
        energy = (x * s ** 2) @ x[0]
        weight = np.exp(beta * (energy - energy.max()))
        c = weight[0] / weight.sum()
        bound = context_bound(c, beta * np.sqrt(d_eff), d_eff, 1.0, energy[1:].var())
        if n / bound - 1 > worst:
            worst = n / bound - 1
            example = f"d = 64, d_eff = {d_eff:.2f}: N = {n} held with c = {c:.2f}, bound {bound:.2f}"
        bulk = np.log(np.exp(beta * energy[1:]).mean()) / beta
        exact = 1 + (1 - c) / c * np.exp(beta * (d * 1.0 - bulk))     # ambient d, exact E_bulk: not an approximation
        repaired = max(repaired, n / exact - 1)
    paper = {name: context_bound(0.46, kappa, 12.3, 4.44, 6.68)
             for name, kappa in (("kappa 1", 1.0), ("beta 1/sqrt(d_head), d_head 64", (12.3 / 64) ** 0.5))}
    return dict(
        claim="longest context that a sink can hold", inside=worst, outside=worst, tol=1e-9, scope="condition",
        condition="true with the ambient d in place of d_eff and the exact log-mean-exp in place of its second "
        f"cumulant (violation then {repaired:.1g})", counterexample=example,
        note="the paper's own numbers for Qwen3-0.6B (d_eff 12.3, norms 4.44, variance 6.68, c 0.46) give N_max = "
        + ", ".join(f"{v:.2g} ({k})" for k, v in paper.items()) + "; its Table 10 prints 115", paper_numbers=paper,
        repaired_violation=repaired)


# ---------------------------------------------------------------- Section IV: vorticity and splitting

def eq53(rng, trials):
    d, m, eps, inside, outside = 8, 20, 1e-2, 0.0, 0.0
    for _ in range(trials):
        up, gate, down = normal(rng, m, d), normal(rng, m, d), normal(rng, d, m)
        ffn = lambda y: down @ (torch.nn.functional.silu(gate @ y) * (up @ y))
        x, gain = normal(rng, d), 1 + 0.5 * normal(rng, d)
        for g, is_gain in ((torch.ones_like(gain), False), (gain, True)):
            total = jacrev(lambda v: ffn(g * rms_ball(v, eps)))(x)
            jac = g[:, None] * rms_jacobian(x, eps)
            k = jacrev(ffn)(g * rms_ball(x, eps))
            s, a = (k + k.T) / 2, (k - k.T) / 2
            vort = total.T - total
            printed = -(s @ jac - jac @ s) - (a @ jac + jac @ a)
            if is_gain:
                outside = max(outside, relative(printed, vort))
                fold, j0 = k * g, rms_jacobian(x, eps)          # gains moved into W_in: K diag(g), J symmetric again
                s, a = (fold + fold.T) / 2, (fold - fold.T) / 2
                printed = -(s @ j0 - j0 @ s) - (a @ j0 + j0 @ a)
            inside = max(inside, relative(printed, vort))
    return dict(
        claim="FFN vorticity = commutator + anticommutator", inside=inside, outside=outside, tol=1e-10, scope="condition",
        condition="J symmetric: unit gains, or the gains folded into W_in",
        counterexample=f"learned gains left in the norm: relative error {outside:.2f}")


def eq59(rng, trials):
    d, inside, outside = 5, 0.0, np.inf
    for _ in range(trials):
        a, b, c, e = (rng.standard_normal((d, d)) / d ** 0.5 for _ in range(4))
        t = lambda z, x: np.tanh(a @ x + z * (b @ x))
        r = lambda z, x: np.sin(c @ x + z * (e @ x + 1))
        x0 = rng.standard_normal(d)
        # exact derivatives at (0, x0)
        dt = (1 - np.tanh(a @ x0) ** 2)[:, None] * a
        dr = np.cos(c @ x0)[:, None] * c
        tz, rz = (1 - np.tanh(a @ x0) ** 2) * (b @ x0), np.cos(c @ x0) * (e @ x0 + 1)
        t0, r0 = t(0, x0), r(0, x0)
        bracket = dr @ t0 - dt @ r0
        rest = {"frozen": [], "advanced": [], "sign": []}
        steps = np.array([0.04, 0.02, 0.01])
        for h in steps:
            flow = integrate.solve_ivp(lambda z, x: t(z, x) + r(z, x), (0, h), x0, "DOP853", rtol=1e-13, atol=1e-15)
            exact = flow.y[:, -1]
            trotter = x0 + h * t0
            frozen, advanced = trotter + h * r(0, trotter), trotter + h * r(h, trotter)
            printed = h ** 2 / 2 * (tz + rz + dt @ t0 + dr @ r0 - bracket)
            rest["frozen"].append(np.linalg.norm(exact - frozen - printed))
            rest["advanced"].append(np.linalg.norm(exact - advanced - printed))
            rest["sign"].append(np.linalg.norm(exact - frozen - printed - h ** 2 * bracket))
        order = {k: np.polyfit(np.log(steps), np.log(v), 1)[0] for k, v in rest.items()}
        inside = max(inside, 3 - order["frozen"])
        outside = min(outside, 3 - order["advanced"], 3 - order["sign"])
    return dict(
        claim="second-order error of attention-then-FFN", inside=inside, outside=outside, tol=0.25, scope="algebra",
        condition="both sub-steps use the weights of the same depth z; a smooth field and a small step",
        counterexample="FFN weights taken at z + h, or the bracket's sign turned: the remainder is of order 2, not 3",
        note="the error is 3 minus the measured order of the remainder")


# ---------------------------------------------------------------- Section V: gauge

def attention_gauge(rng, d, heads, d_h, freqs, samples=12, n=5):
    """Symmetries of causal-free RoPE attention as a function of its weights, counted from its Jacobian.

    freqs: (d_h/2,) rotation frequencies. Returns (all, compact): dimension of the null space of
    d(output)/d(W_Q, W_K, W_V, W_O) over random inputs, and of its part generated by skew matrices, which keeps |W|.
    """
    w = [normal(rng, heads, d_h, d) for _ in range(3)] + [normal(rng, heads, d, d_h)]
    angle = torch.arange(n, dtype=torch.float64)[:, None] * freqs

    def turn(v):  # (heads, n, d_h)
        a, b = v.chunk(2, -1)
        return torch.cat([a * angle.cos() - b * angle.sin(), a * angle.sin() + b * angle.cos()], -1)

    def out(wq, wk, wv, wo, x):
        q, k, v = (torch.einsum("hkd,nd->hnk", m, x) for m in (wq, wk, wv))
        att = (turn(q) @ turn(k).mT / d).softmax(-1)
        return torch.einsum("hdk,hnk->nd", wo, att @ v)

    rows = [torch.cat([j.reshape(n * d, -1) for j in jacrev(out, argnums=(0, 1, 2, 3))(*w, normal(rng, n, d))], 1)
            for _ in range(samples)]
    _, s, vt = torch.linalg.svd(torch.cat(rows))
    null = vt[int((s > 1e-9 * s[0]).sum()):]
    # a null direction is dW_O = W_O X and dW_Q = Y W_Q in each head; it is compact iff X and Y are skew
    size = heads * d_h * d
    dq, do = null[:, :size].reshape(-1, heads, d_h, d), null[:, 3 * size:].reshape(-1, heads, d, d_h)
    x, y = torch.linalg.pinv(w[3]) @ do, dq @ torch.linalg.pinv(w[0])
    symmetric = torch.stack([x + x.mT, y + y.mT]).transpose(0, 1).reshape(len(null), -1)
    s = torch.linalg.svdvals(symmetric)
    return len(null), len(null) - int((s > 1e-8 * s[0]).sum())


def eq74(rng, trials):
    inside, lines = 0, []
    rope = lambda d_h: 50.0 ** -(torch.arange(d_h // 2, dtype=torch.float64) * 2 / d_h)
    for d, heads, d_h in ((8, 2, 4), (12, 3, 4), (10, 1, 6)):
        printed = heads * (d_h * (d_h - 1) // 2 + d_h // 2)
        full, compact = attention_gauge(rng, d, heads, d_h, rope(d_h))
        inside = max(inside, abs(compact - printed))
        lines.append(f"d {d}, {heads} head(s) of {d_h}: {printed} printed, {compact} compact, {full} in all")
    equal = attention_gauge(rng, 8, 2, 4, torch.full((2,), 0.7, dtype=torch.float64))[1]
    return dict(
        claim="gauge dimension of attention under RoPE", inside=inside, outside=abs(full - printed), tol=0.5,
        scope="condition", condition="attention alone, distinct frequencies, and only the directions that weight decay "
        "leaves free; without it each head has d_h^2 + d_h",
        counterexample=f"all directions that leave the output alone (no weight decay): {full} against {printed}; "
        f"two equal frequencies: {equal} compact ones against 16", note="; ".join(lines))


def eq77(rng, trials):
    inside, outside = 0.0, np.inf
    for _ in range(5 * trials):
        w, a = normal(rng, 6, 10), normal(rng, 6, 6)
        cosine = lambda u, v: float((u * v).sum().abs() / (u.norm() * v.norm()))
        inside = max(inside, cosine(w, (a - a.T) @ w))
        outside = min(outside, cosine(w, a @ a.T @ w), cosine(w * w.abs(), (a - a.T) @ w))
    return dict(
        claim="weight decay has no component along rotations", inside=inside, outside=outside, tol=1e-12,
        scope="algebra",
        condition="Frobenius inner product and plain weight decay",
        counterexample=f"a symmetric generator, or an inner product weighted per entry as Adam's is: cosine at least "
        f"{outside:.2g}")


CHECKS = {n: f for n, f in ((6, eq6), (7, eq7), (16, eq16), (18, eq18), (24, eq24), (25, eq25), (36, eq36), (40, eq40),
                            (47, eq47), (53, eq53), (59, eq59), (74, eq74), (77, eq77))}


def run_checks(seed=0, trials=3):
    """All checks as a list of dicts with inside and outside errors, tolerance and verdict."""
    out = []
    for number, check in CHECKS.items():
        result = check(np.random.default_rng([seed, number]), trials)
        out.append(dict(equation=number, **result, verdict=decide(result)))
    return out


def main():
    args = models.parser(__doc__).parse_args()
    if (args.model, args.dtype) != ("micro", "float64"):
        raise models.UserError("this test needs no model and always runs in float64: leave out --model and --dtype")
    checks = run_checks(args.seed, trials=1 if args.quick else 5)
    for c in checks:
        print(f"\nEq. {c['equation']}: {c['claim']}: {c['verdict']}")
        print(f"  as printed: error {c['inside']:.2g} (allowed {c['tol']:.0e})\n  condition: {c['condition']}")
        print(f"  counterexample ({c['outside']:.2g}): {c['counterexample']}")
        if c.get("note"):
            print(f"  note: {c['note']}")
    claims = [dict(
        claim=f"Eq. {c['equation']}: {c['claim']}", paper="exact", theory=c["condition"],
        ours=f"error {c['inside']:.1e}",
        null=f"{c['counterexample']} (error {c['outside']:.1e})", verdict=c["verdict"],
        rule=f"by the two errors against {c['tol']:.0e} and the scope {c['scope']!r}: see the head of identities.py",
        would_change="an instance that meets the condition and breaks the equation" if c["verdict"] != FALSE else
        "no instance in the equation's domain may break it; this one does") for c in checks]

    def figure():
        fig, ax = models.figure_axes(1)
        fig.set_size_inches(8, 4)
        at = range(len(checks))
        floor = 1e-17
        ax.semilogy(at, [max(c["inside"], floor) for c in checks], "ko", label="as printed")
        ax.semilogy(at, [c["outside"] for c in checks], "k^", mfc="white", label="counterexample")
        ax.semilogy(at, [c["tol"] for c in checks], "k_", ms=16, label="tolerance")
        ax.set(xticks=at, xticklabels=[str(c["equation"]) for c in checks], xlabel="equation of the paper",
               ylabel="error (relative)", ylim=(floor / 2, 1e3), title="thirteen identities")
        ax.legend(fontsize=8)
        return fig

    models.report(args, SimpleNamespace(name="analytic", about={}), "identities", "paper, Sections II to V",
                  dict(trials=1 if args.quick else 5), {c["equation"]: c for c in checks}, claims, figure)


if __name__ == "__main__":
    models.run_main(main)
