r"""Is there a critical context length? The paper's noise haystack, with the prefix it does not mention, and the sink.

    PPL(N) = exp(mean loss of the N − 1 predictions in the first N tokens),  N = 8 .. 512
    uniform noise over V tokens: cross-entropy >= ln V for every model, so PPL >= V at every N: no cliff can exist
    P tokens of text, then noise:  ln PPL(N) = (P a + (N − P) b)/N,  a, b the mean losses on text and noise  (mixing)
         it gives where PPL rises, not how much: the first tokens of noise cost more than b (error printed, in nats)
    c₀ = attention mass on the first token;  logits scaled by α² (W_Q and W_K by α each):
         d c₀/d ln s = c₀ s (E₀ − ⟨E⟩) >= 0 in the logit scale s: if the sink has more than the mean logit, c₀ falls and
         reaches 1/N, in any softmax, trained or not
    N_max < 1 + (1−c)/c · exp(κ √d_eff ‖W_Q‖‖W_K‖ − κ² σ_E²/(2 d_eff))                                          Eq. 47
         d_eff = √(sr W_Q · sr W_K),  sr W = ‖W‖_F²/‖W‖²,  β = the head's 1/√d_h,  κ = β √d_eff

    symbol     variable            shape
    tokens     ids                 (seeds, N)
    loss       losses              (seeds, N-1), position t predicts token t+1
    c₀         sink                (seeds, N), of each query, mean over layers and heads
    E          logits / β          (heads, N, N)

The paper does not say how a haystack of uniform noise scores PPL 23 at N <= 32. Text before the noise does it, and
then the cliff is where the text ends: tried with P = 16, 32, 64, 128. Two interventions ask whether the sink is the
cause: scale all logits but hold c₀ at its unscaled value, and remove the first token from attention at full scale
(control: remove another). Every input opens as the tokenizer opens a text: Gemma's <bos> is its sink, and a second one
would reset it. Perplexities at all N come from one causal pass. The paper's threshold PPL < 500 is V^0.52 for its
vocabulary of 151,936; here V^0.52. d_h is read from the weights: hidden size / heads, as the paper's Table 10
has it, is not d_h for Qwen3 and Gemma 3. Their query and key norms also make |W_Q||W_K| no measure of the logits:
Eq. 47 is evaluated there as printed.
Source: the paper's Section VI.5, Tables 10 and 11, Eq. 47.

    python geometry/context_horizon.py                    # micro: 10 seconds on two CPU cores, once it is trained
    python geometry/context_horizon.py --model smollm2    # 5 minutes of one CPU core
"""
import math

import numpy as np
import torch
import torch.nn.functional as F
from scipy import optimize, stats

import models

LENGTHS = (8, 12, 16, 20, 24, 28, 32, 48, 64, 80, 96, 128, 160, 192, 224, 256, 320, 384, 448, 512)
ALPHAS = (0.1, 0.2, 0.3, 0.35, 0.4, 0.45, 0.5, 0.55, 0.6, 0.7, 0.8, 0.9, 0.95, 1.0)
TEXT_ALPHAS = (0.1, 0.3, 0.5, 0.7, 0.9, 1.0)      # on plain text
PREFIXES = (16, 32, 64, 128)
TABLE11 = {1.0: (0.515, 0.442), 0.6: (0.235, 0.059), 0.3: (0.052, 0.002)}      # c0 at N = 16 and 512


def attention(block, x, scale, hold, remove):
    """One attention sublayer with its probabilities: T(x) (s, n, d), p (s, heads, n, n).

    scale multiplies the logits; hold: the first key keeps the mass it has at scale 1; remove: hide this key from later
    queries.
    """
    q, k, v = block.qkv(block.attn_norm(x))
    logits = block.logits(q, k)
    if remove is not None:
        logits[..., remove + 1:, remove] = -torch.inf
    p = (logits * scale).softmax(-1)
    if hold:
        first = logits.softmax(-1)[..., :1]
        rest = p[..., 1:] / p[..., 1:].sum(-1, keepdim=True).clamp_min(1e-30)
        p = torch.cat([first, rest * (1 - first)], -1)
    out = F.linear((p @ v).transpose(-2, -3).flatten(-2), *block.o)
    return (out if block.post_attn_norm is None else block.post_attn_norm(out)), p, q, k


@torch.no_grad()
def run(model, ids, scale=1.0, hold=False, remove=None, probe=None):
    """ids (s, n) -> losses by position (s, n-1), sink mass of each query (s, n); probe(layer, q, k, p) may look in."""
    x, sink = model.embed(ids), 0.0
    for i, block in enumerate(model.blocks):
        out, p, q, k = attention(block, x, scale, hold, remove)
        x = x + out
        x = x + block.R(x)
        sink = sink + p[..., 0].mean(1)
        if probe:
            probe(i, q, k, p)
    losses = []
    for rows, target in zip(x[:, :-1].split(64, 1), ids[:, 1:].split(64, 1)):   # (s, 64, V) at a time
        logits = model.logits(rows).flatten(0, 1)
        losses.append(F.cross_entropy(logits, target.flatten(), reduction="none").view(target.shape))
    return torch.cat(losses, 1).double(), (sink / len(model.blocks)).double()


def mean_loss(losses, n):
    """ln PPL of the first n tokens, one value a seed."""
    return losses[:, :n - 1].mean(1).numpy()


def curve(losses, lengths):
    """ln PPL(N): (lengths, seeds)."""
    return np.array([mean_loss(losses, n) for n in lengths])


def steepest(log_ppl, lengths):
    """(N before, N after, factor) of the largest rise between neighbouring lengths; log_ppl: (lengths, seeds)."""
    rise = np.diff(log_ppl.mean(1))
    i = int(rise.argmax())
    return lengths[i], lengths[i + 1], float(np.exp(rise[i]))


def longest(log_ppl, lengths, threshold):
    """Last N with PPL < threshold; 0 if none."""
    below = [n for n, v in zip(lengths, log_ppl.mean(1)) if v < math.log(threshold)]
    return below[-1] if below else 0


def below_prefix(points, prefix):
    """(x, N_max) with N_max > 0, up to the first that reaches the prefix: from there on its length is the answer."""
    points = [(x, n) for x, n in points if n > 0]
    first = next((i for i, (_, n) in enumerate(points) if n >= prefix), len(points))
    return points[:first + 1]


def fit_growth(x, n):
    """AIC of n ~ a exp(b x) and of n ~ a + b x, both by least squares in n; the smaller, the better."""
    x, n = np.array(x, float), np.array(n, float)
    b, log_a = np.polyfit(x, np.log(n), 1)                                           # where the search starts
    exponential = optimize.least_squares(lambda p: np.exp(p[0] + p[1] * x) - n, (log_a, b)).fun
    linear = np.polyval(np.polyfit(x, n, 1), x) - n
    return tuple(len(n) * math.log(max((r ** 2).mean(), 1e-9)) + 4 for r in (exponential, linear))


def stable_rank(w):
    s = torch.linalg.svdvals(w.double())
    return float(s.square().sum() / s[0] ** 2), float(s[0])


def head_probe(model, heads):
    """A probe that appends, per head: d_eff, |W_Q||W_K| with the norm's gain folded in, kappa, bulk variance of E and
    c0 at the last query, and ln N_max by Eq. 47."""
    def look(i, q, k, p):
        block = model.blocks[i]
        group = block.heads // block.kv_heads
        wq = (block.q[0] * block.attn_norm.gain).unflatten(0, (block.heads, -1))
        wk = (block.k[0] * block.attn_norm.gain).unflatten(0, (block.kv_heads, -1))
        key_ranks = [stable_rank(w) for w in wk]
        for h in range(block.heads):
            (rq, nq), (rk, nk) = stable_rank(wq[h]), key_ranks[h // group]
            d_eff = (rq * rk) ** 0.5
            energy = (q[:, h, -1:] @ k[:, h].mT)[:, 0, 1:].double()              # (s, n-1), last query, sink left out
            c, var = p[:, h, -1, 0].double().clamp(1e-12, 1 - 1e-12), energy.var(1)          # (s,)
            kappa = block.scale * d_eff ** 0.5
            exponent = kappa * d_eff ** 0.5 * nq * nk - kappa ** 2 * var / (2 * d_eff)
            bound = torch.logaddexp(torch.zeros_like(c), ((1 - c) / c).log() + exponent)     # ln N_max
            heads.append(dict(layer=i, head=h, d_head=wq.shape[1], d_eff=d_eff, norms=nq * nk, kappa=kappa,
                              variance=float(var.mean()), c0=float(c.mean()), c0_least=float(c.min()),
                              ln_bound=float(bound.mean()), ln_bound_most=float(bound.max())))
    return look


def key_probe(model, ranks):
    """A probe that appends, per key head and sequence, tr(S)/|S| of the keys' second moment and of their covariance."""
    def look(i, q, k, p):
        for keys in k[:, ::model.blocks[i].heads // model.blocks[i].kv_heads].flatten(0, 1):
            ranks.append((stable_rank(keys)[0], stable_rank(keys - keys.mean(0))[0]))
    return look


def scaled_random_sink(rng, alphas, n, c0):
    """c0 against alpha for Gaussian logits plus one logit that holds mass c0 at alpha = 1: no model, no training."""
    e = rng.standard_normal((200, n)) * 2
    e[:, 0] = np.log(c0 / (1 - c0)) + np.log(np.exp(e[:, 1:]).sum(1))
    out = []
    for a in alphas:
        w = np.exp(a ** 2 * (e - e.max(1, keepdims=True)))
        out.append(float((w[:, 0] / w.sum(1)).mean()))
    return out


def main():
    args = models.parser(__doc__, dtype="float32").parse_args()
    model = models.load(args)
    rng, quick = np.random.default_rng(args.seed), args.quick
    seeds, top = (2, 64) if quick else (3, 512)
    lengths = [n for n in LENGTHS if n <= min(top, model.context)]
    n = lengths[-1]
    alphas = ALPHAS[::4] + (1.0,) if quick else ALPHAS
    prefixes = [p for p in PREFIXES if p < n // 2 + 1]
    size = len(model.alphabet)
    threshold = size ** (math.log(500) / math.log(151936))

    # inputs: (seeds, n) each
    corpus = models.load_text("shakespeare", args.data_dir).text
    starts = rng.integers(0, len(corpus) - 12 * n, seeds)
    pieces = [model.encode(corpus[s:s + 12 * n])[:n] for s in starts]
    if min(map(len, pieces)) < n:
        raise models.UserError(f"{model.name} makes fewer than {n} tokens of {12 * n} characters of text")
    text, start = torch.stack(pieces), model.encode("").long()                        # start: <bos>, or nothing
    noise = torch.cat([start.expand(seeds, -1), model.random_tokens(seeds, n, seed=args.seed)], 1)[:, :n]
    order = torch.from_numpy(rng.permuted(np.tile(np.arange(1, n), (seeds, 1)), axis=1))
    inputs = {"noise": noise, "text": text, "text in random order": torch.cat([text[:, :1], text.gather(1, order)], 1)}
    inputs |= {f"{p} of text, then noise": torch.cat([text[:, :p], noise[:, p:]], 1) for p in prefixes}

    # 1. perplexity against length, and where it breaks
    passes, heads, ranks = {}, [], {"noise": [], "text": [], "text in random order": []}
    for name, ids in inputs.items():
        probes = [head_probe(model, heads)] if name == "noise" else []
        probes += [key_probe(model, ranks[name])] if name in ranks else []
        passes[name] = run(model, ids, probe=lambda *look: [p(*look) for p in probes])
    logs = {name: curve(losses, lengths) for name, (losses, _) in passes.items()}
    found = {name: steepest(v, lengths) for name, v in logs.items()}
    b = float(logs["noise"][-1].mean())
    a = {m: float(v.mean()) for m, v in zip(lengths, logs["text"])}
    mixed = {p: np.array([(min(p, m) * a[min(p, m)] + max(0, m - p) * b) / m for m in lengths]) for p in prefixes}
    jump = {p: (found[f"{p} of text, then noise"], steepest(mixed[p][:, None], lengths)) for p in mixed}
    mixing_error = max(float(np.abs(logs[f"{p} of text, then noise"].mean(1) - mixed[p]).max()) for p in mixed)
    show = [m for m in (8, 16, 32, 48, 64, 128, 256, 512) if m in lengths]
    models.table(f"Perplexity by length, mean of {seeds} seeds (alphabet {size}, so noise can't be below that)",
                 ("input", *(f"N={m}" for m in show), "steepest", "factor"),
                 [(k, *(f"{math.exp(v[lengths.index(m)].mean()):.3g}" for m in show), f"{found[k][0]} -> {found[k][1]}",
                   f"{found[k][2]:.2f}") for k, v in logs.items()])

    # text after a haystack of m tokens, <bos> among them: the loss on 31 tokens of text, alone
    after = {}
    for m in [0] + [m for m in (8, 16, 32, 48, 64, 128, 256, 480) if m <= n - 32]:
        before = noise[:, :max(m, len(start))]
        losses, _ = run(model, torch.cat([before, text[:, len(start):len(start) + 32]], 1))
        after[m] = losses[:, before.shape[1]:].mean(1).tolist()
    models.table("Perplexity of 32 tokens of text after N of noise", [f"N={m}" for m in after],
                 [[f"{math.exp(np.mean(v)):.3g}" for v in after.values()]])

    # 2. logit scaling
    prefix = 32 if 32 in mixed else prefixes[-1]
    main_input = f"{prefix} of text, then noise"
    sweep = {name: {} for name in (main_input, "text")}
    for name, a in [(main_input, a) for a in alphas] + [("text", a) for a in TEXT_ALPHAS]:
        losses, sink = passes[name] if a == 1 else run(model, inputs[name], scale=a ** 2)
        log_ppl = curve(losses, lengths)
        sweep[name][a] = dict(log_ppl=log_ppl.mean(1).tolist(), n_max=longest(log_ppl, lengths, threshold),
                              sink_last=[float(sink[:, m - 1].mean()) for m in lengths],
                              sink_mean=[float(sink[:, 1:m].mean()) for m in lengths])
    models.table(f"Logits times alpha^2, {main_input}: sink mass of the last query (1/N: no sink), PPL, longest N with "
                 f"PPL below {threshold:.0f}",
                 ("alpha", *(f"c0 N={m}" for m in show), f"PPL N={n}", "N_max", "N_max on text"),
                 [(alpha, *(f"{s['sink_last'][lengths.index(m)]:.3f}" for m in show),
                   f"{math.exp(min(s['log_ppl'][-1], 99)):.3g}", s["n_max"],
                   sweep["text"].get(alpha, {"n_max": ""})["n_max"])
                  for alpha, s in sweep[main_input].items()])
    full = sweep[main_input][1.0]
    at16, on_text = lengths.index(16), sweep["text"][1.0]
    kept = full["sink_last"][-1] / full["sink_last"][at16]
    rise, change = (math.exp(s["log_ppl"][-1] - s["log_ppl"][at16]) for s in (full, on_text))
    sync = {name: float(stats.spearmanr(np.ravel([s["sink_last"] for s in sw.values()]),
                                        np.ravel([s["log_ppl"] for s in sw.values()])).statistic) for name,
            sw in sweep.items()}
    sync |= {f"{name}, alpha = 1": float(stats.spearmanr(sw[1.0]["sink_last"], sw[1.0]["log_ppl"]).statistic)
             for name, sw in sweep.items()}
    falls = [sweep[main_input][a]["sink_last"][-1] for a in alphas]
    null_sink = scaled_random_sink(rng, alphas, n, min(max(falls[-1], 2 / n), 0.99))
    monotone = lambda v: all(y >= x - 0.01 for x, y in zip(v, v[1:]))  # noqa: E731
    points = below_prefix([(a ** 2, s["n_max"]) for a, s in sweep[main_input].items()], prefix)
    distinct = sorted({m for _, m in points})
    growth = fit_growth(*zip(*points)) if len(distinct) > 3 else (math.nan, math.nan)
    reach = {p: longest(logs[f"{p} of text, then noise"], lengths, threshold) for p in prefixes}

    # 3. is the sink the cause?
    base = on_text["log_ppl"][-1]
    removed = {k: float(mean_loss(run(model, text, remove=k)[0], n).mean() - base) for k in (0, 4)}
    rescue = []
    for a in (0.3, 0.5, 0.7):
        scaled = sweep["text"][a]["log_ppl"][-1] - base
        held = float(mean_loss(run(model, text, scale=a ** 2, hold=True)[0], n).mean() - base)
        rescue.append(dict(alpha=a, scaled=scaled, held=held, rescued=1 - held / scaled if scaled > 0.5 else math.nan))
    models.table(f"Text, N = {n}: rise of ln PPL when logits shrink, with the sink's mass let go and held",
                 ("alpha", "let go", "held", "rescued"), [list(r.values()) for r in rescue])
    print(f"rise of ln PPL at full scale when token 0 is hidden: {removed[0]:+.3f}; when token 4 is: {removed[4]:+.3f}")

    # 4. Eq. 47 and effective dimensions
    # heads with a sink at N = n, in every seed
    holders = [h for h in heads if h["c0_least"] > 0.1]
    broken = [h for h in holders if h["ln_bound_most"] < math.log(n)]
    keys = {k: np.mean(v, 0).tolist() for k, v in ranks.items()}
    med = lambda key: float(np.median([h[key] for h in heads]))  # noqa: E731
    models.table(f"Eq. 47 over {len(heads)} heads (medians), and keys' dimension tr/max",
                 ("d_head", "d_eff", "|WQ||WK|", "sigma_E^2",
                  "c0", "N_max", f"sink heads with N_max < {n}"),
                 [(heads[0]["d_head"], med("d_eff"), med("norms"), med("variance"), med("c0"),
                   f"e^{med('ln_bound'):.1f}", f"{len(broken)}/{len(holders)}")])
    models.table("Dimension of the keys, mean over heads", ("input", "second moment", "covariance"),
                 [(k, *v) for k, v in keys.items()])

    # a sink at full scale, beyond the uniform 1/N
    sunk = falls[-1] > 3 / n
    # shares of a collapse that are the sink's: undone by holding it; had at full scale by hiding it
    collapse = rescue[0]["scaled"]
    shares = [r["rescued"] for r in rescue] + [(removed[0] - removed[4]) / collapse if collapse > 0.5 else math.nan]
    shares = [v for v in shares if not math.isnan(v)]
    at_prefix = [p for p, (ours, _) in jump.items() if ours[0] == p]
    floor = float(np.exp(logs["noise"].mean(1).min()))
    shuffle_ppl = math.exp(float(logs["text in random order"][-1].mean() - logs["text"][-1].mean()))
    same_keys = abs(keys["text in random order"][1] / keys["text"][1] - 1)
    text_kept = on_text["sink_last"][-1] / on_text["sink_last"][at16]
    claims = [
        dict(claim="uniform noise scores PPL 23 up to N = 32, then breaks",
             paper="23 at N <= 32; x23 to x49 at 32 -> 48",
             theory=f"PPL >= {size} at every N", ours=f"lowest {floor:.3g}; steepest factor {found['noise'][2]:.2f}",
             null=f"{main_input}: x{found[main_input][2]:.1f} at {found[main_input][0]} -> {found[main_input][1]}",
             verdict="does not hold" if floor > 0.9 * size else "holds",
             rule="does not hold if pure noise stays above 0.9 of the alphabet's size at every N",
             would_change="the paper's construction of its haystack, if it holds no text"),
        dict(claim="the critical length belongs to the model", paper="32 -> 48 in all three models",
             theory="mixing: the steepest rise starts where the text ends",
             ours="; ".join(f"P = {p}: {a[0]} -> {a[1]} (x{a[2]:.1f})" for p, (a, _) in jump.items()),
             null=f"mixing alone, up to {mixing_error:.2f} nats off: "
             + "; ".join(f"{m[0]} -> {m[1]} (x{m[2]:.1f})" for _, m in jump.values()),
             verdict="does not hold" if len(at_prefix) == len(jump) > 1 else "holds" if not at_prefix
             else "not decided",
             rule="does not hold if the steepest rise starts at P for every prefix length P",
             would_change="a cliff that stays while the prefix moves"),
        dict(claim="noise makes the model forget (amnesia)", paper="total beyond 64",
             theory="loss on later text rises to ln V",
             ours=f"PPL of text after {list(after)[-1]} of noise: {math.exp(np.mean(list(after.values())[-1])):.3g}",
             null=f"without noise: {math.exp(np.mean(after[0])):.3g}; alphabet {size}",
             verdict="does not hold" if np.mean(list(after.values())[-1]) - np.mean(after[0]) <
             0.5 * (math.log(size) - np.mean(after[0])) else "holds",
             rule="does not hold if text after the longest noise costs less than half the way from its PPL alone to V",
             would_change="text unreadable after noise"),
        dict(claim="c0 and PPL move together",
             paper="strict anti-correlation at every (alpha, N); own Table 11: c0 0.515 -> 0.442 at "
             "alpha 1 while PPL goes 23 -> 6e5", theory="one cause",
             ours=f"alpha = 1, N = 16 -> {n}: PPL x{rise:.3g}, c0 keeps {kept:.0%}",
             null=f"text: PPL x{change:.2g}, c0 keeps {text_kept:.0%}; "
             f"rank correlation over all alpha, N: {sync[main_input]:+.2f}, at alpha = 1: "
             f"{sync[main_input + ', alpha = 1']:+.2f}",
             verdict="not decided" if not sunk or rise < 2 else
             "does not hold" if kept > 0.5 or change <= 1 and text_kept <= kept else "holds",
             rule="not decided without a sink (c0 < 3/N) or when PPL does not double with N at alpha = 1; does not "
             "hold if c0 then keeps more than half of its mass, or as much as on text, where PPL does not rise",
             would_change="a c0 that falls where PPL rises, and there alone"),
        dict(claim="c0 evaporates in order as alpha falls", paper="0.51 to 0.002: excludes trivial causes",
             theory="c0 falls to 1/N in any softmax", ours=f"{falls[-1]:.3f} -> {falls[0]:.3f} (1/N = {1 / n:.3f})",
             null=f"random logits: {null_sink[-1]:.3f} -> {null_sink[0]:.3f}",
             verdict="not decided" if not sunk else "does not hold" if not monotone(falls) else
             "holds trivially (algebra)" if monotone(null_sink) else "holds",
             rule="not decided without a sink (c0 < 3/N); monotonic in alpha (to 0.01) for the model and random logits "
             "alike: trivial",
             would_change="random logits that keep their sink"),
        dict(claim="losing the sink's mass causes the collapse", paper="direct causal link",
             theory="holding c0 rescues; removing the sink collapses",
             ours="; ".join(f"alpha {r['alpha']}: {r['scaled']:+.2f} let go, {r['held']:+.2f} held" for r in rescue)
             + f"; first token hidden at full scale: {removed[0]:+.2f}",
             null=f"fifth token hidden: {removed[4]:+.2f}",
             verdict=("not decided" if not sunk or not shares else "holds" if min(shares) > 0.5 else
                      "does not hold" if max(shares) < 0.5 else "not decided"),
             rule="not decided without a sink (c0 < 3/N); shares: of each rise of ln PPL above 0.5 when logits shrink, "
             "what holding c0 undoes; of that at alpha 0.3, what hiding the first token, less hiding the fifth, brings "
             "at full scale; holds if all are above half, does not hold if all are below",
             would_change="a share above half"),
        dict(claim="N_max grows exponentially in alpha^2",
             paper="30.2 exp(0.09 alpha^2 |WQ||WK|), no test against linear", theory="Eq. 47",
             ours=f"N_max up to the prefix: {', '.join(map(str, distinct))} ({len(points)} point{'s' * (len(points) != 1)})"
             + (f"; AIC exponential {growth[0]:.1f}, linear {growth[1]:.1f}" if len(distinct) > 3 else ""),
             null="at alpha = 1: " + ", ".join(f"P = {p}: N_max {m}" for p, m in reach.items()),
             verdict="not decided" if not abs(growth[0] - growth[1]) > 2 else
             "holds" if growth[0] < growth[1] else "does not hold",
             rule="points up to the first N_max that reaches the prefix; not decided with fewer than four values of "
             "N_max; then by AIC of the two least-squares fits in N_max, a difference above 2",
             would_change="an N_max that moves with alpha below the prefix, or does not move with the prefix"),
        dict(claim="Eq. 47 bounds the context", paper="115, 1 and 1 with d_eff; 1e14 to 1e71 with d_head",
             theory="upper bound on N",
             ours=f"median e^{med('ln_bound'):.1f}; below {n} in {len(broken)} of {len(holders)} heads with a sink at "
             f"N = {n}",
             null="identities.py, Eq. 47: fails on isotropic tokens too",
             verdict="does not hold" if broken else "not decided" if not holders or med("ln_bound") > math.log(1e4)
             else "holds",
             rule=f"does not hold if a head has c0 > 0.1 at N = {n} above its own bound, in every seed; not decided if "
             "no head has a sink, or if none is above and the median bound exceeds 10,000, so that nothing was tested",
             would_change="a bound near the lengths used"),
        dict(claim="low key dimension is why text survives",
             paper="16 to 50 for text, below the noise boundary 32 to 48",
             theory="text below noise",
             ours=f"covariance: text {keys['text'][1]:.1f}, noise {keys['noise'][1]:.1f}; second moment: "
             f"{keys['text'][0]:.1f}, {keys['noise'][0]:.1f}",
             null=f"text in random order: {keys['text in random order'][1]:.1f}, with PPL x{shuffle_ppl:.1f}",
             verdict="does not hold" if same_keys < 0.1 and shuffle_ppl > 2 or keys["text"][1] >= keys["noise"][1]
             else "not decided",
             rule="does not hold if shuffled text has the same key dimension (to 10%) at more than twice the PPL, or "
             "if text's is not "
             "below noise's", would_change="a dimension that tells readable text from the same tokens shuffled"),
    ]

    def figure():
        fig, ax = models.figure_axes(4, height=3.8, dpi=95)
        for (name, v), style in zip(logs.items(), ("ko-", "ks-", "kx--", "k^:", "kv:", "k<:", "k>:")):
            ax[0].loglog(lengths, np.exp(v.mean(1)), style, ms=4, lw=0.9, mfc="white", label=name)
        for p, v in mixed.items():
            ax[0].loglog(lengths, np.exp(v), color="0.7", lw=3, zorder=0,
                         label=f"mixing, {mixing_error:.2f} nats off" if p == prefixes[0] else None)
        ax[0].axhline(size, color="0.4", ls="--", lw=0.8)
        ax[0].set(xlabel="length N, tokens", ylabel="perplexity", title="perplexity by length")
        for a, style in zip((1.0, 0.6, 0.3, 0.1), ("ko-", "ks--", "k^:", "kv-.")):
            if a in sweep[main_input]:
                ax[1].loglog(lengths, sweep[main_input][a]["sink_last"], style, ms=4, mfc="white", label=f"alpha {a}")
        ax[1].loglog(lengths, 1 / np.array(lengths), color="0.6", lw=3, zorder=0, label="1/N")
        ax[1].set(xlabel="length N, tokens", ylabel="sink mass, last query", title="attention sink")
        ax[2].plot(alphas, falls, "ko-", mfc="white", label="model")
        ax[2].plot(alphas, null_sink, "ks--", mfc="white", label="random logits")
        ax[2].set(xlabel="alpha", ylabel=f"sink mass at N = {n}", title="sink mass by logit scale")
        a = [r["alpha"] for r in rescue]
        ax[3].plot(a, [r["scaled"] for r in rescue], "ko-", mfc="white", label="sink let go")
        ax[3].plot(a, [r["held"] for r in rescue], "ks--", mfc="white", label="sink held")
        ax[3].axhline(removed[0], color="0.6", ls=":", label="sink removed, alpha 1")
        ax[3].set(xlabel="alpha", ylabel="rise of ln PPL on text", title="sink let go, held, removed")
        for x in ax:
            x.legend(fontsize=6)
        return fig

    models.report(
        args, model, "context_horizon", "paper, Section VI.5",
        dict(lengths=lengths, alphas=alphas, text_alphas=TEXT_ALPHAS, logit_factor="alpha^2",
             prefixes=prefixes, seeds=seeds,
             threshold=threshold,
             alphabet=size, paper_table11=TABLE11),
        dict(log_ppl={k: v.tolist() for k, v in logs.items()}, steepest=found,
             mixing={p: v.tolist() for p, v in mixed.items()},
             mixing_error=mixing_error, text_after_noise=after, sweep=sweep, correlation=sync, null_sink=null_sink,
             growth=dict(points=points, aic=growth, n_max_by_prefix=reach),
             removed=removed, rescue=rescue, sink_shares=shares, heads=heads, key_dimension=keys), claims, figure)


if __name__ == "__main__":
    models.run_main(main)
