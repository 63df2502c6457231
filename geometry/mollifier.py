"""
RMSNorm's epsilon as a "topological mollifier": how far the norm's Jacobian stretches as epsilon -> 0, and who cares.

    N(x) = g * x / s,   s = sqrt(|x|^2/d + eps)          J = DN(x) = diag(g) (I - x x^T / (d s^2)) / s
    |x| -> 0:  J -> diag(g) / sqrt(eps),   sigma_max = max|g| / sqrt(eps)         slope -1/2, whatever g is
    C = sigma_max / sqrt(d / eps) = max|g| / sqrt(d)      the paper's "gauge mass"; it reads C = RMS(g) <f> (Eq. 81)
    |x| large: J -> diag(g) (I - x x^T/|x|^2) sqrt(d)/|x|         no eps left; the two meet at |x|^2/d = eps

    symbol      variable             shape
    g           norm.gain            (d,)         full factor, 1 + w for Gemma
    x           probe                (10, d)      |x| = 1e-10, random directions
    J           jacobian             (10, d, d)
    sigma_max   sigma                (30,)        mean over the directions, per eps
    -1/2, R^2   fit()                             least squares in log10
    |x|^2/d     real                 (2L, n)      mean square of the stream at each norm, on English

Source: paper Sec. VI.1, Theorem 2, Eqs. 7 and 81, Tables 2 and 3. Its rho(x) = sqrt(d) x / sqrt(|x|^2 + eps) has
another epsilon, d times the code's: its bound sqrt(d/eps) is for that one; the code's is 1/sqrt(eps) at unit gain.
Protocol as printed: the norm alone, 5 layers, 30 eps from 1e-2 to 1e-15, 10 directions, float64, autograd Jacobian,
full SVD. Controls that know nothing of the theory: random gains, eps outside the root, the same norm at the tokens'
own length, float32.

    python geometry/mollifier.py                    micro: 10 seconds on two CPU cores (and once a minute to train it)
    python geometry/mollifier.py --model smollm2    2 minutes on two CPU cores, nearly all of it SVD
Expect slope -0.5000 for the model and for random gains alike, C = max|g|/sqrt(d) to 1e-8, and a perplexity that does
not notice eps anywhere from 1e-15 up to its set value and beyond. On gemma3, some of whose norms of the FFN's output read
vectors with |x|^2/d far below eps, it moves by percents, up on some passages and down on others.
"""
import dataclasses
import math

import torch
from scipy.stats import spearmanr

import models  # noqa: I001  puts the folder above on the path
import metrics

PAPER = {"Qwen3-0.6B": (0.033, 2.172, 1024), "Gemma-3-1B": (0.098, 0.125, 1152), "LLaMA-3.1-8B": (0.014, 0.017, 4096)}


def sigma_max(norm, x):
    """x (k, d) -> (k,): largest singular value of the norm's Jacobian, by automatic differentiation and a full SVD."""
    jacobian = torch.func.vmap(torch.func.jacrev(norm))(x)
    return torch.linalg.svdvals(jacobian)[:, 0]


def sweep(norm, epsilons, x):
    """Mean sigma_max over the probes, per epsilon (double, whatever x is)."""
    return torch.stack([sigma_max(norm(e), x).mean().double() for e in epsilons])


def fit(epsilons, sigma):
    """Least squares log10 sigma = slope log10 eps + b -> (slope, R^2)."""
    u, v = torch.tensor(epsilons, dtype=torch.float64).log10(), sigma.log10()
    slope = ((u - u.mean()) * (v - v.mean())).sum() / (u - u.mean()).square().sum()
    rest = v - v.mean() - slope * (u - u.mean())
    return slope.item(), 1 - (rest.square().sum() / (v - v.mean()).square().sum()).item()


def gain_norm(norm):
    """The exact prefactor of 1/sqrt(eps) at the origin: max|g|, for LayerNorm with the centring as well."""
    d = len(norm.gain)
    if norm.center:
        return torch.linalg.matrix_norm(norm.gain[:, None] * (torch.eye(d).to(norm.gain) - 1 / d), 2).item()
    return norm.gain.abs().max().item()


def with_eps(model, eps):
    """The model with every norm that it has, those of heads and sublayers' outputs too, at this epsilon."""
    swap = lambda v: dataclasses.replace(v, eps=eps) if isinstance(v, models.Norm) else v  # noqa: E731
    blocks = [models.Block(**{name: swap(v) for name, v in vars(b).items()}) for b in model.blocks]
    return dataclasses.replace(model, blocks=blocks, final_norm=swap(model.final_norm))


def main():
    parser = models.parser(__doc__)
    args = parser.parse_args()
    model = models.load(args)
    d, last = model.d, len(model.blocks) - 1
    layers = models.spread_layers(0, last, 5)  # 0, 6, 13, 20, 27 of 28, as in the paper
    epsilons = torch.logspace(-2, -15, 8 if args.quick else 30, dtype=torch.float64).tolist()
    g = torch.Generator().manual_seed(args.seed)
    probe = torch.randn(2 if args.quick else 10, d, generator=g, dtype=torch.float64)
    probe = 1e-10 * probe / probe.norm(dim=-1, keepdim=True)

    # -- the paper's protocol: the input norm of each sampled layer, alone
    rows, curves = [], {}
    for layer in layers:
        norm = model.blocks[layer].attn_norm
        norm = dataclasses.replace(norm, gain=norm.gain.double(), bias=None)  # a bias has no part in the Jacobian
        sigma = sweep(lambda e: dataclasses.replace(norm, eps=e), epsilons, probe)
        slope, r2 = fit(epsilons, sigma)
        c = (sigma / torch.tensor([math.sqrt(d / e) for e in epsilons])).mean().item()
        curves[layer] = sigma.tolist()
        rows.append(dict(layer=layer, slope=slope, r2=r2, C=c, exact_C=gain_norm(norm) / math.sqrt(d),
                         rms_gain=norm.gain.square().mean().sqrt().item(), max_gain=norm.gain.abs().max().item()))
    models.table("Table 2: slope and intercept", ("layer", "slope", "R^2", "C", "max|g|/sqrt d", "RMS(g)", "C/RMS(g)"),
                 [[r["layer"], f"{r['slope']:.6f}", f"{r['r2']:.8f}", r["C"], r["exact_C"], r["rms_gain"],
                   r["C"] / r["rms_gain"]] for r in rows])

    # -- controls. The middle layer's gain, unless the control is about the gain
    norm = model.blocks[layers[len(layers) // 2]].attn_norm
    norm = dataclasses.replace(norm, gain=norm.gain.double(), bias=None)
    random_gain = dataclasses.replace(norm, gain=torch.randn(d, generator=g, dtype=torch.float64))
    single = dataclasses.replace(norm, gain=norm.gain.float())
    corpus = models.load_text("shakespeare", args.data_dir).text
    starts = range(0, len(corpus) - 700, len(corpus) // (3 if args.quick else 8))
    passages = [model.encode(text)[:min(model.context, 150)] for text in (models.PASSAGE, *(corpus[k:k + 700] for k in starts))]
    english = passages[0]
    stream = []  # the input of every norm of the stream
    for block, x in zip(model.blocks, model.states(english)):
        stream += [x, x + block.T(x)]
    real = torch.stack([x.double().square().mean(-1) for x in stream])  # (2L, n)
    token = probe * (math.sqrt(d * real.median().item()) / 1e-10)
    outside = lambda e: lambda x: norm.gain * x / (x.square().mean(-1, keepdim=True).sqrt() + e)  # noqa: E731
    few, token_slope = probe[:2], "at the tokens' length"
    controls = {
        "random gains": sweep(lambda e: dataclasses.replace(random_gain, eps=e), epsilons, few),
        "eps outside the root": sweep(outside, epsilons, few),
        "at the tokens' length": sweep(lambda e: dataclasses.replace(norm, eps=e), epsilons, token[:2]),
        "float32": sweep(lambda e: dataclasses.replace(single, eps=e), epsilons, few.float())}
    fits = {name: fit(epsilons, sigma) for name, sigma in controls.items()}
    models.table("Controls: the same sweep", ("norm", "slope", "R^2"),
                 [[k, f"{s:.6f}", f"{r:.8f}"] for k, (s, r) in fits.items()])

    # -- the gain of every norm of the stream: is C an RMS of it, and does it grow with depth?
    norms = [n for b in model.blocks for n in (b.attn_norm, b.ffn_norm)]
    exact = torch.tensor([gain_norm(n) for n in norms], dtype=torch.float64) / math.sqrt(d)
    rms = torch.stack([n.gain.double().square().mean().sqrt() for n in norms])
    ratio = exact / rms
    spread = (ratio.std() / ratio.mean()).item()

    # -- does epsilon matter where the model lives?
    own = model.blocks[0].attn_norm.eps
    share = (own / (real + own)).max().item()  # of eps in mean square + eps, the most exposed token
    factors = [e for e in (10.0 ** k for k in range(-15, 3, 3 if args.quick else 1)) if abs(e / own - 1) > 1e-3]
    losses = {e: torch.tensor([with_eps(model, e).loss(ids) for ids in passages], dtype=torch.float64) for e in [own, *factors]}
    ppl = {e: math.exp(loss.mean()) for e, loss in losses.items()}
    tiny = losses[1e-15] - losses[own]  # (passages,): log of the factor by which perplexity rises
    rise, half = metrics.mean_interval(tiny.tolist())
    harmful = next((e for e in factors if e > own and ppl[e] > 1.01 * ppl[own]), math.inf)
    stretch = max(n.gain.double().abs().max().item() / math.sqrt(x.double().square().mean(-1).min().item())
                  for n, x in zip(norms, stream))  # an upper bound on any of their sigma_max at a real token
    models.table("Perplexity of English with every norm's eps replaced", ("eps", "perplexity", "change"),
                 [[f"{e:.0e}", ppl[e], f"{ppl[e] / ppl[own] - 1:+.2e}"] for e in sorted(ppl)])

    slopes_ok = all(abs(r["slope"] + 0.5) < 1e-4 and r["r2"] > 1 - 1e-8 for r in rows)
    null_ok = abs(fits["random gains"][0] + 0.5) < 1e-4
    worst = max(abs(r["C"] / r["exact_C"] - 1) for r in rows)
    rank = spearmanr(range(len(rows)), [r["C"] for r in rows]).statistic if len({r["C"] for r in rows}) > 1 else 0.0
    yes = lambda good: "holds" if good else "does not hold"  # noqa: E731
    claims = [
        dict(claim="slope -1/2 over 13 decades", paper="-0.5000, R2 1.000000", theory="-1/2",
             ours=f"{min(r['slope'] for r in rows):.4f} to {max(r['slope'] for r in rows):.4f}",
             null=f"random gains {fits['random gains'][0]:.4f}, eps outside {fits['eps outside the root'][0]:.4f}",
             verdict="does not hold" if not slopes_ok else "holds trivially (algebra)" if null_ok else "holds",
             rule="every slope within 1e-4 of -1/2 and R2 > 1 - 1e-8; trivially if random gains do the same",
             would_change="a slope other than -1/2, or random gains with another slope"),
        dict(claim="intercept C = RMS(g) <f> (Eq. 81)", paper="0.033 to 2.172 (Qwen3)", theory="max|g|/sqrt d",
             ours=f"max|g|/sqrt d to {worst:.0e}", null=f"C/RMS(g) varies {100 * spread:.2g}% over {len(norms)} norms",
             verdict=yes(spread < 1e-6),
             rule="holds if C/RMS(g) is one constant over all norms to 1e-6 (coefficient of variation), as C/max|g| is",
             would_change="gains whose maximum is proportional to their RMS, as equal gains: both readings are right there"),
        dict(claim="C grows with depth", paper="Qwen3 yes, LLaMA no", theory="none: it is max|g|",
             ours=", ".join(f"{r['C']:.3f}" for r in rows) + f": rank correlation {rank:.1f}", null="none needed",
             verdict="holds" if rank > 1 - 1e-9 else "does not hold" if rank < 0.5 else "not decided",
             rule="holds if C strictly rises over the sampled layers, does not hold if its rank correlation (Spearman) with "
                  "depth is below 0.5, else not decided", would_change="another model: it is a fact of its gains"),
        dict(claim="float64 was strictly necessary", paper="float32 rounds to 0", theory="1e-20 is normal in float32",
             ours=f"float32 slope {fits['float32'][0]:.4f}", null="the same probe",
             verdict=yes(abs(fits["float32"][0] + 0.5) > 1e-3),
             rule="holds if float32's slope is off by more than 1e-3",
             would_change="an eps that float32 can't hold, below 1e-45"),
        dict(claim="eps is no mere safeguard", paper="1e-12 would destabilise", theory="no effect if eps << |x|^2/d",
             ours=f"perplexity {100 * rise:+.2g}% +- {100 * half:.2g}% at 1e-15 ({len(tiny)} passages, "
                  f"{100 * tiny.min():+.2g}% to {100 * tiny.max():+.2g}%)",
             null=f"worse by 1% only from eps = {harmful:.0e}",
             verdict="holds" if rise - half > 0.01 else "does not hold" if rise + half < 0.01 else "not decided",
             rule="holds if perplexity rises by more than 1% when every eps becomes 1e-15, by the 95% interval of the mean over "
                  "passages; does not hold if the interval lies below 1%",
             would_change="tokens with |x|^2/d near eps: here eps is at most "
                          f"{share:.1e} of the sum under the root of a norm of the stream"),
        dict(claim="stretch sqrt(d/eps) is what a layer sees", paper=f"{math.sqrt(d / own):.0f} at eps {own:.0e}",
             theory="1/sqrt(eps), reached at x = 0 only", ours=f"at most {stretch:.1f} at real tokens",
             null=f"slope at the tokens' length {fits[token_slope][0]:.1e}",
             verdict=yes(stretch > 0.5 * math.sqrt(d / own)),
             rule="holds if max|g|/rms(x) over real tokens reaches half of sqrt(d/eps)",
             would_change="tokens of length near sqrt(d eps)")]
    protocol = dict(layers=layers, epsilons=epsilons, probe_norm=1e-10, directions=len(probe),
                    jacobian="torch.func.jacrev", svd="torch.linalg.svdvals, full",
                    english_tokens=[len(ids) for ids in passages], paper_C_first_last_d=PAPER)
    numbers = dict(layers=rows, sigma=curves, controls={k: dict(slope=s, r2=r, sigma=controls[k].tolist())
                                                        for k, (s, r) in fits.items()},
                   all_norms=dict(C=exact.tolist(), rms=rms.tolist(), ratio_variation=spread), own_eps=own,
                   mean_square=dict(min=real.min().item(), median=real.median().item(), max=real.max().item()),
                   eps_share_worst_token=share, perplexity={f"{e:.3g}": v for e, v in ppl.items()}, log_rise_at_1e_15=tiny.tolist(),
                   first_harmful_eps=harmful, real_stretch_bound=stretch)

    def figure():
        fig, (left, right) = models.figure_axes(2)
        for marker, (layer, sigma) in zip("os^Dv", curves.items()):
            left.loglog(epsilons, sigma, marker, ms=3, mfc="none", color="k", label=f"layer {layer}")
        left.loglog(epsilons, [math.sqrt(d / e) for e in epsilons], "-", color="0.6", label="sqrt(d/eps), the paper")
        left.loglog(epsilons, [1 / math.sqrt(e) for e in epsilons], "--", color="k", label="1/sqrt(eps), g = 1")
        left.loglog(epsilons, controls["at the tokens' length"], ":", color="k", label="at the tokens' length")
        left.set(xlabel="eps", ylabel="sigma_max of the norm's Jacobian", title=f"{model.name}: |x| = 1e-10")
        left.legend(fontsize=6)
        right.loglog(sorted(ppl), [ppl[e] for e in sorted(ppl)], "k.-")
        right.axvline(own, ls="--", color="k", label="the model's eps")
        right.axvspan(real.min().item(), real.max().item(), color="0.85", label="mean square of real tokens")
        right.set(xlabel="eps of every norm", ylabel="perplexity of English", title="does eps matter?")
        right.legend(fontsize=6)
        return fig

    models.report(args, model, "mollifier", "paper Sec. VI.1", protocol, numbers, claims, figure)


if __name__ == "__main__":
    models.run_main(main)
