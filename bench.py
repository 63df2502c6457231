"""
Speed and memory of nanosphere: every claim a ratio, measured in one process on the device at hand.

    ratio     median over rounds of (seconds of B)/(seconds of A), A and B taken in turn, in shuffled orders, in one process
    spread    its quartiles
    verdict   from the 95% interval of that median (order statistics): met where it lies at or below the goal, not met
              where it lies above, else not decided. A single number is compared with the goal as it is.
    bound     the seconds that can't be avoided: the greater of flops over the machine's measured matmul rate and bytes
              over its measured copy rate. flops: matrix products alone (metrics.count_flops). bytes of a training step:
              operands and results of every matrix product, forward and backward, and AdamW's passes over parameters
    reached   bound over measured seconds, of B

On one CPU thread the clock is the process's CPU time, which other programs on the machine move little; on more threads
it is the wall; on CUDA, events after a warm-up. SECTIONS, at the end of the file, lists what is measured.

    $ python bench.py                      # about 9 minutes on two CPU cores: results/bench-cpu.json and .png
    $ python bench.py --only noise compile
    $ python bench.py --quick              # a minute, to see that all of it works: its numbers mean nothing
"""
import contextlib
import cProfile
import ctypes
import gc
import itertools
import json
import math
import os
import pathlib
import pstats
import random
import resource
import signal
import statistics
import subprocess
import sys
import tempfile
import time

import torch
import torch.nn as nn
import torch.nn.functional as F

import harness
import metrics
from data import character_data, load_text, windows
from harness import UserError
from model import ARMS, Transformer
from noise_block import TangentNoise
from rope_consensus import lambda_max, rope_tables, rotate, symmetrized, unit

HERE = pathlib.Path(__file__).resolve().parent


# -------------------------------------------------------------------------------------------------- measuring

def clock(device):
    if device.type == "cpu" and torch.get_num_threads() == 1:
        return time.process_time()
    if device.type != "cpu":
        torch.accelerator.synchronize()
    return time.perf_counter()


def seconds(call, device):
    """Seconds of call(), or what it returns if that is a number: its own measurement."""
    if device.type == "cuda":
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        own = call()
        end.record()
        torch.cuda.synchronize()
        elapsed = start.elapsed_time(end) / 1000
    else:
        start = clock(device)
        own = call()
        elapsed = clock(device) - start
    return own if isinstance(own, float) else elapsed


def summary(ratios):
    """Median, quartiles, and a 95% interval of the median from order statistics (the whole range below 6 values)."""
    ratios, n = sorted(ratios), len(ratios)
    # the k-th smallest and k-th largest enclose the median with probability 1 - 2 P(Binomial(n, 1/2) < k)
    k = max([k for k in range(1, n // 2 + 1) if sum(math.comb(n, i) for i in range(k)) / 2 ** n <= 0.025], default=1)
    return {"ratio": statistics.median(ratios), "quartiles": [ratios[n // 4], ratios[-1 - n // 4]],
            "interval": [ratios[k - 1], ratios[-k]], "rounds": n}


def in_turn(bench, calls, rounds=None):
    """Seconds of every call, and the ratio of each to the first one: {name: {seconds, ratio, quartiles, interval}}.

    calls: {name: function}. A warm-up round, then rounds in shuffled orders, since a call after itself finds warm caches;
    each round gives one ratio."""
    taken, order, rng = {name: [] for name in calls}, list(calls), random.Random(0)
    for number in range(-1, rounds or bench.rounds):
        rng.shuffle(order)
        for name in order:
            spent = seconds(calls[name], bench.device)
            if number >= 0:
                taken[name].append(spent)
    first = next(iter(taken.values()))
    return {name: {"seconds": statistics.median(spent), "all": spent, **summary([b / a for a, b in zip(first, spent)])}
            for name, spent in taken.items()}


def peak_memory(call, device):
    """Bytes by which call() raises the peak memory of the device, or of this process; None where that can't be told."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        call()
        return torch.cuda.max_memory_allocated() - before
    status = pathlib.Path("/proc/self/status")
    kib = lambda key: int(next(line for line in status.read_text().splitlines() if line.startswith(key)).split()[1])
    gc.collect()
    try:
        ctypes.CDLL(None).malloc_trim(0)  # what was freed goes back, so that it is not used again unseen
        pathlib.Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew (Linux)
    except (OSError, AttributeError):
        return None
    before = kib("VmRSS")
    call()
    return 1024 * (kib("VmHWM") - before)


class Bench:
    """Device, rounds, the machine's rates, and the rows so far: {section: [row]}."""

    def __init__(self, args, device):
        self.device, self.quick, self.rounds = device, args.quick, 2 if args.quick else args.rounds
        n = 256 if self.quick else 2048
        a, b = torch.randn(2, n, n, device=device)
        big = torch.randn(2 ** (16 if self.quick else 24), device=device)
        out = torch.empty_like(big)
        best = lambda call: min(seconds(call, device) for _ in range(5))
        self.rates = {"matmul_flops_per_second": 2 * n ** 3 / best(lambda: a @ b),  # float32, as PyTorch sets it
                      "copy_bytes_per_second": 8 * big.numel() / best(lambda: out.copy_(big))}
        self.sections, self.data = {}, character_data(load_text("pydoc"), 8192)

    def bound(self, flops, moved):
        return max(flops / self.rates["matmul_flops_per_second"], moved / self.rates["copy_bytes_per_second"])

    def row(self, section, what, goal=None, value=None, taken=None, bound=None, unit="", **more):
        """A row: value (a number) or taken (an entry of in_turn) against the goal, at most."""
        row = {"what": what, "goal": goal, "value": value, "unit": unit, **more}
        low, high = taken["interval"] if taken else (value, value)
        if taken:
            row |= {"value": taken["ratio"], "unit": "ratio", "spread": taken["quartiles"],
                    "interval": taken["interval"], "seconds": taken["seconds"], "rounds": taken["rounds"]}
            if bound:
                row |= {"bound_seconds": bound, "reached": bound / taken["seconds"]}
        if goal is not None:
            row["verdict"] = ("not measured" if value is None and not taken else "met" if high <= goal else
                              "not met" if low > goal else "not decided")
        self.sections.setdefault(section, []).append(row)
        return row


def training_step(model, inputs, targets, device, dtype=None, lr=1e-3):
    """One step of the trainers' kind on a batch, a fixed one unless the step is given another, without the harness."""
    model.to(device)
    optimizer = harness.make_optimizer(harness.bare(model), lr, device)

    def step(inputs=inputs, targets=targets):
        with torch.autocast(device.type, dtype, enabled=dtype is not None):
            loss = model(inputs, targets)[1]
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return loss
    return step


def bytes_moved(model, tokens):
    """Bytes a float32 training step can't avoid: every matrix product reads two operands and writes one result, once
    forward and twice backward; AdamW reads parameter, gradient and two moments and writes three of them."""
    layers = [m for m in model.modules() if isinstance(m, nn.Linear)]
    products = sum(3 * (tokens * (m.in_features + m.out_features) + m.weight.numel()) for m in layers)
    return 4 * (products + 7 * sum(p.numel() for p in model.parameters()))


def character_model(bench, arm, layers, dim, heads=4, seed=0, **options):
    torch.manual_seed(seed)
    start = {} if arm == "standard" else dict(eta=0.07, eta_mlp=0.07, beta=6.0)
    return Transformer(len(bench.data.vocabulary), layers, dim, heads, arm, **start, **options)


def character_batch(bench, batch, seq, seed=0):
    starts = torch.randint(len(bench.data.train) - seq, (batch,), generator=torch.Generator().manual_seed(seed))
    return windows(bench.data.train, starts, seq, bench.device)


# --------------------------------------------------------------------------------------------------- sections

def arms(bench):
    """Step (forward, backward, optimiser) of each charlm arm over standard, equal parameters, 24 layers."""
    layers = 2 if bench.quick else 24
    sizes = [(16, 16, 2)] if bench.quick else [(64, 256, 8), (64, 1024, 2), (256, 256, 2), (256, 1024, 1)]
    for dim, seq, batch in sizes:
        inputs, targets = character_batch(bench, batch, seq)
        models = {arm: character_model(bench, arm, layers, dim) for arm in ARMS}
        flops = metrics.count_flops(lambda: models["standard"](inputs.cpu(), targets.cpu())[1].backward())
        taken = in_turn(bench, {arm: training_step(model, inputs, targets, bench.device)
                                for arm, model in models.items()})
        for arm, model in models.items():
            bench.row("arms", f"{arm}, d {dim}, block {seq}, batch {batch}", 1.0 if arm == "consensus-qkv" else None,
                      taken=taken[arm], bound=bench.bound(flops, bytes_moved(model, batch * seq)), flops=flops,
                      tokens_per_second=batch * seq / taken[arm]["seconds"])
    if bench.device.type == "cuda":  # the fused attention kernels
        for seq, batch in ((1024, 8), (8192, 1)):
            model = character_model(bench, "consensus-qkv", layers, 256)
            inputs, targets = character_batch(bench, batch, seq)
            step = training_step(model, inputs, targets, bench.device, torch.bfloat16)
            spent = in_turn(bench, {"fused": step})["fused"]
            bench.row("arms", f"consensus-qkv, d 256, block {seq}, bfloat16", value=inputs.numel() / spent["seconds"],
                      unit="tokens/s")


class PlainBlock(nn.Module):
    """A block as nanoGPT writes it; rope: rotated queries and keys and RMSNorm, as in the trainer's standard arm."""

    def __init__(self, dim, heads, rope):
        super().__init__()
        self.heads, self.rope = heads, rope
        norm = nn.RMSNorm if rope else lambda dim: nn.LayerNorm(dim, bias=False)
        self.ln_1, self.ln_2 = norm(dim), norm(dim)
        self.c_attn, self.c_proj = nn.Linear(dim, 3 * dim, bias=False), nn.Linear(dim, dim, bias=False)
        self.c_fc, self.c_out = nn.Linear(dim, 4 * dim, bias=False), nn.Linear(4 * dim, dim, bias=False)

    def forward(self, x, tables):
        B, T, C = x.shape
        q, k, v = (z.view(B, T, self.heads, C // self.heads).transpose(1, 2)
                   for z in self.c_attn(self.ln_1(x)).split(C, 2))
        if self.rope:
            q, k = rotate(q, *tables), rotate(k, *tables)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.c_proj(y.transpose(1, 2).contiguous().view(B, T, C))
        return x + self.c_out(F.gelu(self.c_fc(self.ln_2(x))))


class Plain(nn.Module):
    """nanoGPT's model with the sizes of the standard arm: learned positions and LayerNorm, or RoPE and RMSNorm."""

    def __init__(self, vocab, layers, dim, heads, block, rope):
        super().__init__()
        self.rope, self.d_head = rope, dim // heads
        self.wte, self.wpe = nn.Embedding(vocab, dim), nn.Embedding(1 if rope else block, dim)
        self.h = nn.ModuleList(PlainBlock(dim, heads, rope) for _ in range(layers))
        self.ln_f = nn.RMSNorm(dim) if rope else nn.LayerNorm(dim, bias=False)
        self.lm_head = nn.Linear(dim, vocab, bias=False)

    def forward(self, idx, targets):
        at = torch.arange(idx.shape[1], device=idx.device)
        x = self.wte(idx) + self.wpe(at * 0 if self.rope else at)
        tables = rope_tables(at, self.d_head) if self.rope else None
        for block in self.h:
            x = block(x, tables)
        logits = self.lm_head(self.ln_f(x))
        return logits, F.cross_entropy(logits.view(-1, logits.shape[-1]), targets.reshape(-1))


def plain(bench):
    """The trainer's standard arm, inside harness.train, against a plain nanoGPT-style model and loop of its sizes."""
    layers, dim, seq, batch, steps = (2, 16, 16, 2, 3) if bench.quick else (24, 64, 256, 8, 5)
    folder, number = tempfile.TemporaryDirectory(), itertools.count()
    marks = []  # the clock at every step's start: the time between two is a whole step, with log and progress

    def one_batch(step):
        marks.append(clock(bench.device))
        return character_batch(bench, batch, seq, step)

    def between():
        spent = statistics.median([b - a for a, b in zip(marks, marks[1:])])
        marks.clear()
        return spent

    def trainer():
        harness.train(pathlib.Path(folder.name) / str(next(number)), character_model(bench, "standard", layers, dim),
                      one_batch, {}, seed=0, steps=steps, lr=1e-3, device=bench.device, dtype=None,
                      evaluate=lambda model: {"val_loss": 0.0}, eval_every=steps, progress=harness.Progress(steps),
                      label="bench")
        return between()

    def loop(rope):
        torch.manual_seed(0)
        model = Plain(len(bench.data.vocabulary), layers, dim, 4, seq, rope).to(bench.device)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=bench.device.type in ("cpu", "cuda"))
        for step in range(steps):
            loss = model(*one_batch(step))[1]
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            loss.item()
        return between()

    model = character_model(bench, "standard", layers, dim)
    inputs, targets = (part.cpu() for part in character_batch(bench, batch, seq))
    flops = metrics.count_flops(lambda: model(inputs, targets)[1].backward())
    bound = bench.bound(flops, bytes_moved(model, batch * seq))
    for name, rope, goal in (("RoPE and RMSNorm, as the arm has", True, 1.0),
                             ("LayerNorm and learned positions, as nanoGPT has", False, None)):
        taken = in_turn(bench, {"plain": lambda: loop(rope), "trainer": trainer})
        bench.row("plain", f"trainer over plain loop with {name}", goal, taken=taken["trainer"], bound=bound,
                  flops=flops)
    profile = cProfile.Profile()
    profile.runcall(trainer)
    cost = {name: sum(entry[3] for (_, _, function), entry in pstats.Stats(profile).stats.items() if function == name)
            for name in ("one_batch", "flush", "advance")}
    bench.row("plain", "batch, log and progress, share of a step", 0.02,
              seconds={name: spent / steps for name, spent in cost.items()},
              value=sum(cost.values()) / steps / taken["trainer"]["seconds"])
    folder.cleanup()


def noise(bench):
    """TangentNoise over residual dropout in the 6-layer model of train_wikitext.py, and the memory that it adds."""
    layers, dim, seq, batch, vocab = (2, 16, 8, 2, 50) if bench.quick else (6, 128, 64, 8, 18011)
    rank = 4 if bench.quick else 8
    idx = torch.randint(vocab, (batch, seq + 1), generator=torch.Generator().manual_seed(0)).to(bench.device)
    make = {f"rank {rank}": lambda layer: TangentNoise(dim, 0.01, 0.03, rank=rank, seed=layer),
            "full A": lambda layer: TangentNoise(dim, 0.01, 0.03, seed=layer), "no noise": lambda layer: None}
    models = {"dropout": dict(arm="standard", dropout=0.1),
              **{name: dict(arm="sphere", step=1 / layers, noise=each) for name, each in make.items()}}
    for name in models:
        torch.manual_seed(0)
        models[name] = Transformer(vocab, layers, dim, 4, **models[name])
    taken = in_turn(bench, {name: training_step(model, idx[:, :-1], idx[:, 1:], bench.device)
                            for name, model in models.items()}, 2 * bench.rounds)
    kept = {}
    for name, model in models.items():
        flops = metrics.count_flops(lambda: model.cpu()(idx[:, :-1].cpu(), idx[:, 1:].cpu())[1].backward())
        bench.row("noise", f"{name} over dropout", {f"rank {rank}": 1.03, "full A": 1.10}.get(name), taken=taken[name],
                  bound=bench.bound(flops, bytes_moved(model, batch * seq)), flops=flops)
        kept[name] = {}

        def pack(tensor):
            kept[name][tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            alive = model(idx[:, :-1].cpu(), idx[:, 1:].cpu())  # kept until here, so that no address is used twice
        del alive
    for name in list(make)[:2]:
        added = sum(kept[name].values()) - sum(kept["no noise"].values())
        bench.row("noise", f"{name}: numbers kept for the backward pass, over tokens x d", 8.0, unit="",
                  value=added / 4 / layers / (batch * seq * dim), bytes=added)


def spectrum(bench):
    """lambda_max without a mask against eigvalsh of the symmetrised matrix, both from the tokens; accuracy; n-curve."""
    d = 64
    draw = lambda n: unit(torch.randn(n, d, generator=torch.Generator().manual_seed(n))).to(bench.device)
    for n, goal in ((64, None),) if bench.quick else ((1024, 1 / 5), (4096, 1 / 20)):
        centres, spots = draw(16), torch.arange(n, device=bench.device) % 16
        drawn = {"random": draw(n), "in 16 clusters": unit(centres[spots] + 0.1 * draw(n))}
        for beta, (kind, x) in itertools.product((1.0, 6.0), drawn.items()):  # the block's default, the trainers'
            dense = lambda: torch.linalg.eigvalsh(torch.eye(n, device=bench.device) - symmetrized(x, beta))
            exact = dense()[-1].item()
            value, residual, converged = lambda_max(x, beta)
            what = f"{kind} tokens, beta {beta:g}, n {n}"
            bench.row("lambda_max", f"relative error, {what}", 1e-3, value=abs(value.item() / exact - 1),
                      converged=bool(converged), residual=residual.item())
            bench.row("lambda_max", f"not converged, {what}", 0, value=int(not converged))
            taken = in_turn(bench, {"eigvalsh": dense, "lambda_max": lambda: lambda_max(x, beta)}, 3 if n > 2000 else None)
            # half of W is formed once: n^2/2 times 2 d flops; each product with it, one at least, reads those n^2/2 numbers
            bench.row("lambda_max", f"over eigvalsh, {what}", goal, taken=taken["lambda_max"],
                      bound=bench.bound(n * n * d, 2 * n * n))
    sizes = [64, 128, 256, 512, 1024] if bench.quick else [4096, 8192, 16384, 32768, 65536]
    curve = []
    for n in sizes:
        x, point = draw(n), {"n": n}

        def call():
            start = clock(bench.device)
            value, residual, converged = lambda_max(x, 6.0, iters=8)  # the same work at every size
            point.update(lambda_max=value.item(), converged=bool(converged), seconds=clock(bench.device) - start)
        point["bytes"] = peak_memory(call, bench.device)
        curve.append(point)
        bench.row("lambda_max", f"seconds of 8 steps, n {n}, d {d}", value=point["seconds"], unit="s", **point)
    big = curve[1:]  # from the first size whose matrix is not kept
    bench.row("lambda_max", f"GB of memory, n {n}", 2.0, value=point["bytes"] and point["bytes"] / 1e9, unit="GB")
    for key, goal in (("seconds", 2.2), ("bytes", 1.2)):
        slope = None
        if all(each[key] for each in big):
            slope = math.log(big[-1][key] / big[0][key]) / math.log(big[-1]["n"] / big[0]["n"])
        bench.row("lambda_max", f"exponent of n in {key}, n {big[0]['n']} to {n}", goal, value=slope)
    figure, (left, right) = harness.figure_axes(2)
    for axis, key, scale, power, label in ((left, "seconds", 1, 2, "time (s)"),
                                           (right, "bytes", 1e6, 1, "memory added (MB)")):
        if all(each[key] for each in curve):
            axis.loglog(sizes, [each[key] / scale for each in curve], "ko-", mfc="none", label="measured")
            axis.loglog(sizes, [curve[-1][key] / scale * (m / n) ** power for m in sizes], "k--", lw=1,
                        label=f"proportional to n^{power}" if power > 1 else "proportional to n")
            axis.legend(fontsize=7)
        axis.minorticks_off()
        axis.set_xticks(sizes, [f"{m:,}" for m in sizes], fontsize=7)
        axis.set(xlabel="tokens n", ylabel=label)
    bench.figure = figure


def control(bench):
    """The eta control every 100 steps as a share of training: with a causal mask, and without one."""
    layers, dim, seq, batch = (2, 16, 16, 2) if bench.quick else (12, 64, 256, 4)
    for causal, eta in ((True, 0.07), (False, 0.07), (False, 3.0)):
        model = character_model(bench, "consensus-qkv", layers, dim, causal=causal)
        inputs, targets = character_batch(bench, batch, seq)
        step = training_step(model, inputs, targets, bench.device)

        def controlled():
            for block in model.blocks:
                nn.init.constant_(block.attn.eta, eta)
            model.control(inputs)
        taken = in_turn(bench, {"step": step, "control": controlled})
        low, high = summary(taken["step"]["all"])["quartiles"]
        goal = (high - low) / taken["step"]["seconds"] if causal else 0.01  # less than steps differ is not measurable
        mask = "causal, goal: the spread of a step" if causal else "no mask"
        bench.row("control", f"K 100, eta {eta:g}, {mask}: share of training", goal,
                  value=taken["control"]["ratio"] / 100, spread=[q / 100 for q in taken["control"]["quartiles"]],
                  seconds=taken["control"]["seconds"])


def measures(bench):
    """Metrics against a matmul of the Gram matrix, in blocks; k-means against scikit-learn's, if installed; memory."""
    n, d, k = (256, 8, 4) if bench.quick else (16384, 64, 16)
    x = unit(torch.randn(n, d, generator=torch.Generator().manual_seed(0))).to(bench.device)
    block = torch.empty(min(64, n), n, device=bench.device)

    def gram():
        for rows in x.split(len(block)):
            torch.matmul(rows, x.mT, out=block)
    kmeans = lambda: metrics.spherical_kmeans(x, k)
    calls = {"Gram matrix": gram, "angular_diameter": lambda: metrics.angular_diameter(x),
             "antipolar_fraction": lambda: metrics.antipolar_fraction(x),
             "cosine_entropy": lambda: metrics.cosine_entropy(x)}
    taken = in_turn(bench, calls)
    for name in list(calls)[1:]:
        flops = 2 * n * d * d if name == "cosine_entropy" else n * n * d  # each pair once
        bench.row("metrics", f"{name} over the Gram matmul, n {n}", 3.0, taken=taken[name],
                  bound=bench.bound(flops, 4 * n * d))
    names = [*list(calls)[1:], "spherical_kmeans"]
    # in a process of its own: what the other sections left in this one's heap would be counted too
    code = (f"import bench, metrics, torch; torch.manual_seed(0); x = torch.randn({n}, {d}, device='{bench.device}');"
            f"x /= x.norm(dim=-1, keepdim=True); torch.set_num_threads({torch.get_num_threads()});"
            f"call = lambda name, x: getattr(metrics, name)(x, *[{k}] * ('kmeans' in name));"
            f"[call(name, x[:99]) for name in {names}];"  # the libraries' own memory is not counted
            f"print([bench.peak_memory(lambda: call(name, x), x.device) for name in {names}])")
    found = subprocess.run([sys.executable, "-c", code], cwd=HERE, stdout=subprocess.PIPE, text=True, check=True).stdout
    for name, used in zip(names, json.loads(found.replace("None", "null"))):
        bench.row("metrics", f"{name}: peak memory over n x d numbers, n {n} (n x n would be {n // d})", 32.0,
                  value=None if used is None else used / 4 / n / d, bytes=used)
    try:
        from sklearn.cluster import KMeans
    except ImportError:
        bench.row("metrics", "spherical_kmeans over scikit-learn's KMeans (not installed)", 3.0)
        return
    points = x.cpu().numpy()
    theirs = lambda: (KMeans(k, n_init=4, max_iter=50, tol=0).fit(points), None)[1]
    taken = in_turn(bench, {"KMeans": theirs, "spherical_kmeans": kmeans})["spherical_kmeans"]
    bench.row("metrics", f"spherical_kmeans over scikit-learn's KMeans, n {n}, k {k}, 4 starts", 3.0, taken=taken,
              bound=bench.bound(2 * n * d * k, 4 * n * d))


def compiled(bench):
    """Compiled over eager, graph breaks; bfloat16 autocast over float32, and its loss against the spread over seeds."""
    import torch._dynamo
    layers, dim, seq, batch = (1, 16, 16, 2) if bench.quick else (6, 64, 256, 8)
    inputs, targets = character_batch(bench, batch, seq)
    hidden = torch.randn(2, 8, 16, device=bench.device)
    for name, module in (("ConsensusAttention", character_model(bench, "consensus-qkv", 1, 16).blocks[0].attn),
                         ("TangentNoise", TangentNoise(16, 0.1, 0.1))):
        found = torch._dynamo.explain(module.to(bench.device))(hidden)
        bench.row("compile", f"graph breaks in {name}", 0, value=found.graph_break_count)
    backend = "aot_eager" if bench.quick else "inductor"
    steps = {}
    for arm, name in itertools.product(("standard", "consensus-qkv"), ("eager", "compiled")):
        model = character_model(bench, arm, layers, dim)
        forward = torch.compile(model, backend=backend) if name == "compiled" else model
        steps[f"{name} {arm}"] = training_step(forward, inputs, targets, bench.device)
    taken = in_turn(bench, steps)
    for one, other in (("compiled standard", "eager standard"), ("compiled consensus-qkv", "eager consensus-qkv"),
                       ("eager consensus-qkv", "eager standard"), ("compiled consensus-qkv", "compiled standard"),
                       ("compiled consensus-qkv", "eager standard")):
        pairs = zip(taken[one]["all"], taken[other]["all"])
        bench.row("compile", f"{one} over {other}", taken={**taken[one], **summary([a / b for a, b in pairs])})
    for arm in ("standard", "consensus-qkv"):
        steps = {}
        for dtype in (None, torch.bfloat16):
            model = character_model(bench, arm, layers, dim)
            steps[str(dtype)] = training_step(model, inputs, targets, bench.device, dtype)
        bench.row("compile", f"bfloat16 over float32, {arm}", taken=in_turn(bench, steps)["torch.bfloat16"])
        losses = {dtype: [final_loss(bench, arm, dtype, seed, 4 if bench.quick else 200) for seed in range(3)]
                  for dtype in (None, torch.bfloat16)}
        change = statistics.mean(losses[torch.bfloat16]) - statistics.mean(losses[None])
        bench.row("compile", f"loss of bfloat16 less float32 after 200 steps, {arm}, over the seeds' s.d.", 1.0,
                  value=abs(change) / statistics.stdev(losses[None]), losses={str(k): v for k, v in losses.items()})


def final_loss(bench, arm, dtype, seed, steps):
    """Mean training loss of the last tenth of `steps`, a small model, seeded."""
    batch = lambda step: character_batch(bench, 8, 64, 1000 * seed + step)
    step = training_step(character_model(bench, arm, 4, 32, 2, seed), *batch(0), bench.device, dtype, lr=1e-2)
    losses = [step(*batch(number)).item() for number in range(steps)]
    return statistics.mean(losses[-max(1, steps // 10):])


@contextlib.contextmanager
def script(*words):
    """A script of the project in a process of its own, which does not outlive this block, nor a kill of this process."""
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    with subprocess.Popen([sys.executable, *map(str, words)], cwd=HERE, stdout=subprocess.DEVNULL,
                          stderr=subprocess.PIPE, text=True) as process:
        try:
            yield process
        finally:
            process.terminate()
            signal.signal(signal.SIGTERM, before)


def finish(*words):
    with script(*words) as process:
        errors = process.communicate()[1]
    if process.returncode:
        raise UserError(f"{' '.join(process.args[1:])} failed: {errors.strip().splitlines()[-1]}")


def startup(bench):
    """Seconds, best of three: of --help, beside import torch alone; from the command to the end of a training step."""
    times = 1 if bench.quick else 3

    def now():  # as clock(), of child processes, once they have ended
        if bench.device.type == "cpu" and torch.get_num_threads() == 1:
            return sum(resource.getrusage(resource.RUSAGE_CHILDREN)[:2])
        return time.perf_counter()
    spent = {"help": [], "torch": [], "step": []}
    for _ in range(times):
        for name, words in (("torch", ("-c", "import torch")), ("help", ("train_charlm.py", "--help"))):
            start = now()
            finish(*words)
            spent[name].append(now() - start)
        with tempfile.TemporaryDirectory() as folder:
            size = ["--layers", 2, "--dim", 16, "--heads", 2] if bench.quick else []
            start = now()
            log = pathlib.Path(folder) / "run" / "consensus-qkv-seq256-seed0" / "metrics.jsonl"
            with script("train_charlm.py", "--dataset", "pydoc", "--arms", "consensus-qkv", "--sample", 0, *size, "--device",
                        bench.device.type, "--threads", torch.get_num_threads(), "--out", f"{folder}/run") as process:
                while process.poll() is None and not (log.exists() and log.stat().st_size):
                    time.sleep(0.02)
            spent["step"].append(now() - start)
    bench.row("startup", "python -c 'import torch', the bound of what follows", value=min(spent["torch"]), unit="s")
    bench.row("startup", "python train_charlm.py --help", 3.0, value=min(spent["help"]), unit="s")
    bench.row("startup", "python train_charlm.py, to the end of its first step", 15.0, value=min(spent["step"]),
              unit="s")


def parallel(bench):
    """torchrun --nproc_per_node=2 against one process with the same batches; its speed where there are cores for it."""
    dim, steps = (16, 4) if bench.quick else (64, 12)
    cards = torch.cuda.device_count() if bench.device.type == "cuda" else (os.cpu_count() or 1)
    if bench.device.type == "cuda" and cards < 2:
        bench.row("parallel", "largest difference of the losses, nats (two cards are needed)", 1e-5)
        return
    losses, spent = {}, {}
    with tempfile.TemporaryDirectory() as folder:
        torchrun = "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"
        for name, launcher in (("one", ()), ("two", torchrun)):
            out = pathlib.Path(folder) / name
            finish(*launcher, "train_charlm.py", "--dataset", "pydoc", "--arms", "consensus-qkv", "--layers", 4, "--dim", dim,
                   "--heads", 2, "--seq", 64, "--batch", 16, "--steps", steps, "--eval-every", steps, "--sample", 0, "--lr",
                   1e-3, "--threads", 1, "--device", bench.device.type, "--dtype", "float32", "--out", out)
            run = out / "consensus-qkv-seq64-seed0"
            losses[name] = [json.loads(line)["loss"] for line in (run / "metrics.jsonl").read_text().splitlines()]
            spent[name] = json.loads((run / "timing.json").read_text())["seconds_per_step"]
    bench.row("parallel", "largest difference of the losses of two processes and one, nats", 1e-5,
              value=max(abs(a - b) for a, b in zip(losses["one"], losses["two"])), losses=losses)
    if cards >= 2:
        bench.row("parallel", "one process's step over twice that of two (scaling efficiency)", unit="",
                  value=spent["one"] / spent["two"] / 2, seconds=spent)


SECTIONS = {"arms": arms, "plain": plain, "noise": noise, "control": control, "metrics": measures, "compile": compiled,
            "startup": startup, "parallel": parallel, "lambda_max": spectrum}


def main():
    parser = harness.Parser("Speed and memory of nanosphere, each claim a ratio in one run.")
    count = harness.number(int, low=1)
    parser.add_argument("--only", nargs="+", choices=SECTIONS, metavar="NAME", default=list(SECTIONS),
                        help=f"among {', '.join(SECTIONS)} (default: all)")
    parser.add_argument("--device", default="auto", help="auto, cpu or cuda (default: %(default)s)")
    parser.add_argument("--threads", type=count, metavar="N", help="CPU threads (default: all cores)")
    parser.add_argument("--rounds", type=count, default=15, metavar="N",
                        help="rounds of every ratio (default: %(default)s)")
    parser.add_argument("--out", type=harness.folder, metavar="FILE",
                        help="results; a figure goes beside (default: results/bench-<device>.json, and -quick after the "
                        "device of a quick run)")
    parser.add_argument("--quick", action="store_true", help="tiny sizes, two rounds: to see that all of it works")
    parser.add_argument("--debug", action="store_true", help="show tracebacks")
    args = parser.parse_args()
    device, _, line = harness.pick_device(args.device, "float32", args.threads)
    print(line)
    out = args.out or HERE / "results" / f"bench-{device.type}{'-quick' * args.quick}.json"
    if out.suffix != ".json" or out.is_dir():
        raise harness.UserError(f"--out {out}: name a .json file, not a folder")
    with harness.writing(out):
        out.parent.mkdir(parents=True, exist_ok=True)
    bench = Bench(args, device)
    bench.sections = harness.read_json(out)["sections"] if out.exists() and args.only != list(SECTIONS) else {}
    for name in args.only:
        bench.sections.pop(name, None)
        began = time.perf_counter()
        SECTIONS[name](bench)
        print(f"\n{name}: {SECTIONS[name].__doc__.splitlines()[0]} ({time.perf_counter() - began:.0f} s)")
        print(harness.table([{**row, "low": row.get("spread", [None])[0], "high": row.get("spread", [None])[-1]}
                             for row in bench.sections[name]],
                            {"what": ("", ""), "value": ("measured", ".4g"), "low": ("25%", ".3f"),
                             "high": ("75%", ".3f"), "unit": ("", ""), "goal": ("goal", ".3g"),
                             "reached": ("reached", ".2f"),
                             "verdict": ("verdict", "")}), flush=True)
        harness.write_json(out, {"command": " ".join(["python", *sys.argv]), "quick": args.quick, "machine": line,
                                 "environment": harness.environment(device), "rates": bench.rates,
                                 "sections": bench.sections})
        if name == "lambda_max":
            harness.save_figure(bench.figure, out.with_suffix(".png"))
    print(f"\nresults in {out}")


if __name__ == "__main__":
    harness.run_main(main, again="start it again")
