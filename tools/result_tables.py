"""Write the tables of numbers in README and docs from benchmarks/results: ``python tools/result_tables.py``."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PAGES = (ROOT / "README.md", ROOT / "docs" / "benchmarks.md", ROOT / "docs" / "whole-step.md")
RESULTS = ROOT / "benchmarks" / "results"
STEPS = {
    "llama_8k": "Llama, 2 x 8192",
    "llama_32k": "Llama, 1 x 32768",
    "llama_ones": "Llama, 2 x 8192, `attention_mask` of ones",
    "llama_padded": "Llama, 2 x 8192, of which 6000 and 7800 are valid",
    "llama_packed": "Llama, 1 x 16384, 8 packed documents",
    "decoder": "decoder that calls SDPA with `is_causal`, 2 x 8192",
    "gpt2_dropout": "GPT-2 medium width, 8 x 4096, dropout",
    "bert_padded": "BERT-large width, 64 x 512, padded, dropout",
    "encoder": "encoder like ViT-L, 8 x 4096",
}
"""Models of the results of `benchmarks.step` and what they are."""
EARLIER_STEPS = {
    "step_32k": "Llama, 4 layers, 1 x 32768 tokens",
    "step_ones": "Llama, 4 layers, 2 x 8192, `attention_mask` of ones",
    "step_padded": "Llama, 4 layers, 2 x 8192 tokens, of which 6000 and 7800 are valid",
    "step_packed": "Llama, 4 layers, 1 x 16384, 8 packed documents",
    "step_ddp": "Llama, 4 layers, 2 x 8192 on each of two GPUs, DDP, `attention_mask` of ones",
    "step_bert": "BERT-large width, 6 layers, 64 x 512, padded, dropout",
    "step_gpt2": "GPT-2 medium width, 4 layers, 8 x 4096, dropout",
    "step_encoder_4096": "encoder like ViT-L, 12 layers, 8 x 4096",
}
"""Results files of steps with torch 2.11 and what they measured."""
MASKS = {
    "documents:16 in 32k": "16 documents in 32768 tokens, causal, 32 heads on 8",
    "documents:64 in 32k": "64 documents in 32768 tokens, causal, 32 heads on 8",
    "documents:8 in 16k": "8 documents in 16384 tokens, causal, 16 heads on 4",
    "padded:6000 and 7800 of 8192": "2 x 8192 tokens, of which 6000 and 7800 are valid, 16 heads",
    "dense:causal 4096": "a causal mask as a tensor, 2 x 4096, 16 heads",
    "dropout:causal 8192": "dropout 0.1, causal, 2 x 8192, 16 heads",
    "bias:[1,H,S,S] 4096": "bias [1, heads, length, length] with its gradient, 2 x 4096, 16 heads",
}
"""Rows of the results of `benchmarks.masks` and what they are."""
CONTENDERS = {
    "torch": "PyTorch, deterministic",
    "varlen": "varlen",
    "flex": "FlexAttention",
    "closed form": "dash_inductor without it",
    "dash": "dash_inductor",
}


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    return "".join(f"| {' | '.join(row)} |\n" for row in (head, ["---"] * len(head), *rows))


def read(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))
    return found


def commit(found: dict[str, Any]) -> str:
    """Returns the hash of the measured commit, or "not recorded" if the results file has no hash."""
    text: str = found["conditions"]["commit"]
    return text if re.fullmatch("[0-9a-f]{7,40}", text) else "not recorded"


Variants = dict[str, dict[str, Any]]
"""The rows of a model, by variant."""


def by_model(name: str) -> dict[str, Variants]:
    """Returns the rows of a results file of `benchmarks.step` by model."""
    found: dict[str, Variants] = {}
    for row in read(name)["rows"]:
        found.setdefault(row["model"], {})[row["variant"]] = row
    return found


def measured_steps() -> dict[str, Variants]:
    """Returns the rows of `benchmarks.step` by model.

    Raises:
        ValueError: a row contradicts what the text above the table states about equal bits.
    """
    found = by_model("step")
    for name, variants in found.items():
        if variants["default"]["equal"] or not variants["dash"]["equal"]:
            raise ValueError(f"{name}: the text above the table says that steps of dash_inductor alone are equal")
    return {name: found[name] for name in STEPS if name in found}


def fastest(variants: Variants) -> dict[str, Any]:
    """Returns the fastest non-deterministic row of a model."""
    free = [row for name, row in variants.items() if name in ("default", "flash", "cudnn", "efficient")]
    return min((row for row in free if "ms" in row), key=lambda row: row["ms"])


def steps() -> str:
    """The table of training steps: time, beside every choice that PyTorch has, and memory."""
    rows = []
    for name, variants in measured_steps().items():
        ours, best = variants["dash"], fastest(variants)
        if ours["ms"] > best["ms"]:
            raise ValueError(f"{name}: the text above the table says that no row of PyTorch is faster")
        times = (variants["default"], best, variants.get("deterministic", {}), variants.get("FA4 deterministic", {}))
        rows.append(
            [
                STEPS[name], *(f"{row['ms']:.1f}" if "ms" in row else "" for row in times), f"**{ours['ms']:.1f}**",
                f"{ours['ms'] / variants['default']['ms']:.2f}", f"**{ours['ms'] / best['ms']:.2f}**",
                f"{ours['memory_mib'] / variants['default']['memory_mib']:.2f}",
            ]
        )  # fmt: skip
    head = [
        "ms a step", "PyTorch's default", "fastest of PyTorch", "PyTorch, deterministic",
        "FlashAttention-4, deterministic", "dash_inductor", "of the default", "of the fastest", "memory",
    ]  # fmt: skip
    return table(head, rows)


def step_kernels() -> str:
    """The table of attention kernels of training steps: what the default ran, and rates in TFLOP/s."""
    rows = []
    for name, variants in measured_steps().items():
        default, ours, best = variants["default"], variants["dash"], fastest(variants)
        rows.append(
            [
                STEPS[name], default["forward"], _both(default), best["forward"], _both(best),
                _both(ours), f"{default['host']:.0%}, {ours['host']:.0%}",
            ]
        )  # fmt: skip
    head = [
        "model", "the default ran", "forward, backward", "fastest of PyTorch", "forward, backward",
        "dash_inductor: forward, backward", "time without a kernel: default, dash_inductor",
    ]  # fmt: skip
    return table(head, rows)


def _both(row: dict[str, Any]) -> str:
    """Returns the rates of both directions, as far as they are known."""
    return ", ".join(f"{row[key]:.0f}" for key in ("forward_tflops", "backward_tflops") if key in row)


def earlier_steps() -> str:
    """The table of training steps with torch 2.11: a row for each results file."""
    rows = []
    for name, title in EARLIER_STEPS.items():
        found = read(name)
        default, ours = ({row["variant"]: row for row in found["rows"]}[variant] for variant in ("default", "dash"))
        times = [f"{row['step ms']:.1f} ms" for row in (default, ours)]
        memory = [f"{row['peak GiB']:.1f} GiB" for row in (default, ours)]
        relative = f"**{ours['step ms'] / default['step ms']:.2f}**"
        rows.append([title, *times, relative, *memory, commit(found)])
    head = ["model and inputs", "default", "dash_inductor", "relative", "peak memory", "dash_inductor", "commit"]
    return table(head, rows)


def masks() -> str:
    """The table of masks: forward and backward of every contender."""
    found = read("masks")
    measured = {row["shape"]: row for row in found["rows"]}
    rows = [
        [title, *(_rates(measured[shape], contender) for contender in CONTENDERS), commit(found)]
        for shape, title in MASKS.items()
    ]
    return table(["attention", *CONTENDERS.values(), "commit"], rows)


def _rates(row: dict[str, Any], contender: str) -> str:
    """Forward and backward in TFLOP/s, the forward of dash_inductor without tables; empty if it was not run."""
    forward, backward = row.get(f"{contender} forward"), row.get(f"{contender} backward")
    if forward is None or backward is None:
        return ""
    if contender == "dash":
        return f"**{row.get('dash forward, tables apart') or forward:.0f}**, **{backward:.0f}**"
    return f"{forward:.0f}, {backward:.0f}"


MODELS = {
    "gpt2": "GPT-2",
    "bert": "BERT",
    "whisper": "Whisper",
    "t5": "T5",
    "llama": "Llama, 128k tokens",
    "gemma3": "Gemma 3",
    "mamba2": "Mamba-2",
    "mixtral": "Mixtral",
    "qwen3_moe": "Qwen3-MoE",
    "gpt_oss": "gpt_oss",
    "deepseek_v3": "DeepSeek-V3's layers",
    "titan_moe": "torchtitan's experts",
    "unet": "a UNet with bilinear upsampling",
    "segmentation": "Segformer",
    "deformable": "deformable attention",
    "vit": "ViT",
    "dit": "DiT",
    "llava": "LLaVA",
    "graph": "a GraphSAGE with a million edges",
    "preferences": "DPO",
    "recommender": "DLRM's bags of embeddings",
}
"""Models of the results in `step_models.json` and what they are."""


def models() -> str:
    """The table of steps of whole models: time, beside PyTorch's default and the fastest of its kernels, and memory."""
    found = by_model("step_models")
    rows = []
    for name, title in MODELS.items():
        if name not in found:
            continue
        default, ours, best = found[name]["default"], found[name]["dash"], fastest(found[name])
        determined = found[name]["deterministic"]
        rows.append(
            [
                title, default["forward"] or "no SDPA", f"{default['ms']:.1f}",
                f"{determined['ms']:.1f}" if "ms" in determined else "error", f"**{ours['ms']:.1f}**",
                f"**{ours['ms'] / default['ms']:.2f}**", f"{ours['ms'] / best['ms']:.2f}",
                f"{ours['memory_mib'] / default['memory_mib']:.2f}",
            ]
        )  # fmt: skip
    head = [
        "model", "the default ran", "default, ms", "PyTorch, deterministic", "dash_inductor", "of the default",
        "of the fastest", "memory",
    ]  # fmt: skip
    return table(head, rows)


RIVALS = {
    "FA2 det": "FA2, deterministic",
    "FA3 nondet": "FA3",
    "FA3 det": "FA3, deterministic",
    "DASH fork det": "DASH fork, deterministic",
    "FA4 nondet": "FA4",
    "FA4 det": "FA4, deterministic",
    "cuDNN nondet": "cuDNN",
    "dash": "dash_inductor",
}
"""Columns of the backward's results, and their titles."""
FORWARDS = {"FA2": "FA2", "cuDNN": "cuDNN", "FA3": "FA3", "FA4": "FA4", "dash": "dash_inductor"}
"""The same of the forward's."""


def rivals(*names: str, titles: dict[str, str] = RIVALS, relative: Sequence[str] = ("FA3 nondet", "FA4 nondet")) -> str:
    """The table of backwards, or of the calls with these titles, beside other kernels, from these results files.

    relative: the columns with which ours is compared.
    """
    measured = [row for name in names for row in read(name)["rows"]]
    columns, ratios = _beside(measured, titles, relative)
    rows = []
    for row in measured:
        _, dims, mask, heads, length = row["shape"].split(":")
        what = (
            f"{dims[1:]} {mask.replace('band(0,1023)', 'window 1024')}, {heads[1:].replace('h', ' x ')}, {length[1:]}"
        )
        rows.append([what, *_beside_others(row, columns, ratios)])
    return table(["head dimension, mask, batch x heads, length", *_titles(titles, columns, ratios)], rows)


def forwards(*names: str) -> str:
    """The table of forwards from the results files of these names: the regular shapes, and short ones."""
    found = [row for name in names for row in read(name)["rows"]]
    measured = [row for row in found if row["shape"].split(":")[0] in ("short", "regular")]
    columns, ratios = _beside(measured, FORWARDS, ("FA3", "FA4"))
    rows = []
    for row in measured:
        _, dims, mask, _, length = row["shape"].split(":")
        rows.append((f"{dims[1:]} {mask}", int(length[1:]), _beside_others(row, columns, ratios)))
    kinds = ["128 full", "128 causal", "64 full", "64 causal"]
    rows.sort(key=lambda row: (kinds.index(row[0]), row[1]))
    head = ["head dimension, mask", "length", *_titles(FORWARDS, columns, ratios)]
    return table(head, [[kind, str(length), *rates] for kind, length, rates in rows])


def _beside(
    rows: Sequence[dict[str, Any]], titles: dict[str, str], relative: Sequence[str]
) -> tuple[list[str], list[str]]:
    """Returns the columns that any row has, and those in `relative` with which ours is compared."""
    columns = [key for key in titles if any(row.get(key) for row in rows)]
    return columns, [key for key in relative if key in columns]


def _titles(titles: dict[str, str], columns: Sequence[str], ratios: Sequence[str]) -> list[str]:
    return [*(titles[key] for key in columns), *(f"relative to {titles[key]}" for key in ratios)]


def _beside_others(row: dict[str, Any], columns: Sequence[str], ratios: Sequence[str]) -> list[str]:
    """Returns the rates of a row, ours last and in bold, and ours relative to each of the others."""
    rates = [f"{row[key]:.0f}" if row.get(key) else "" for key in columns]
    relative = [f"{row['dash'] / row[key]:.2f}" if row.get(key) else "" for key in ratios]
    return [*rates[:-1], f"**{rates[-1]}**", *relative]


KINDS = ("regular", "gqa", "few", "window")
"""Kinds of shapes in the table of forwards beside FlashAttention-3, as far as their names begin with them."""


def beside_flash3() -> str:
    """The table of forwards beside FlashAttention-3: packed documents, by operator and by mask, then sequences."""
    rows = []
    for row in read("masks_fa3")["rows"]:
        ours, theirs = row["operator forward, tables apart"], row["FA3 forward"]
        by_mask = row["dash forward, tables apart"]
        what = row["shape"].removeprefix("documents:").replace("d64", "head dimension 64")
        rows.append(
            [f"documents: {what}", f"{theirs:.0f}", f"**{ours:.0f}**", f"{ours / theirs:.2f}", f"{by_mask:.0f}"]
        )
    for row in read("forward_fa3")["rows"]:
        kind, dims, mask, heads, length = row["shape"].split(":")
        if kind in KINDS and row.get("FA3"):
            mask = mask.replace("band(0,1023)", "window of 1024")
            what = f"{dims[1:]} {mask}, {heads[1:].replace('h', ' x ')}, {length[1:]}"
            rows.append([what, f"{row['FA3']:.0f}", f"**{row['dash']:.0f}**", f"{row['dash'] / row['FA3']:.2f}", ""])
    head = ["documents; or head dimension, mask, batch x heads, length", "FA3", "dash_inductor", "relative", "by mask"]
    return table(head, rows)


def documents_beside_flash4() -> str:
    """The table of packed documents beside FlashAttention-3 and -4: by operator, by mask, and by FlexAttention's."""
    ways = ("operator", "dash", "mask_mod")
    rows = []
    for row in read("masks_fa4")["rows"]:
        what = row["shape"].removeprefix("documents:").replace("d64", "head dimension 64")
        theirs = [row["FA3 forward"], row["FA4 forward"]]
        forward = [row[f"{way} forward, tables apart"] for way in ways]
        backward = [row[f"{way} backward"] for way in ways]
        rows.append(
            [
                what, *(f"{rate:.0f}" for rate in (*theirs, *forward)), f"{forward[0] / max(theirs):.2f}",
                *(f"{rate:.0f}" for rate in (row["FA4 backward"], *backward)),
                f"{backward[0] / row['FA4 backward']:.2f}", f"{backward[2] / row['FA4 backward']:.2f}",
            ]
        )  # fmt: skip
    titles = ["operator", "mask", "`flex_attention`"]
    head = [
        "documents", "forward: FA3", "FA4", *titles, "operator, relative to the faster",
        "backward: FA4", *titles, "operator, relative", "`flex_attention`, relative",
    ]  # fmt: skip
    return table(head, rows)


TABLES: dict[str, Callable[[], str]] = {
    "steps": steps,
    "kernels of steps": step_kernels,
    "steps with torch 2.11": earlier_steps,
    "masks": masks,
    "models": models,
    "forwards": partial(forwards, "forward_short", "forward", "forward_narrow"),
    "forwards beside FA3": beside_flash3,
    "forwards of an H100": partial(forwards, "forward_h100"),
    "rivals": partial(rivals, "backward_rivals", "backward_rivals_also"),
    "rivals of an H100": partial(rivals, "backward_h100", "backward_h100_also"),
    "FlashAttention-4": partial(rivals, "backward_h100_fa4"),
    "FlashAttention-4 on an H200": partial(rivals, "backward_h200_fa4"),
    "forwards beside FA3 and FA4": partial(rivals, "forward_fa4_h200", titles=FORWARDS, relative=("FA3", "FA4")),
    "documents beside FA3 and FA4": documents_beside_flash4,
}


def filled(page: str) -> str:
    """Returns a page with updated tables."""
    for name, make in TABLES.items():
        begin, end = f"<!-- {name}: written by tools/result_tables.py -->\n", f"<!-- end of {name} -->"
        if begin in page:
            head, rest = page.split(begin)
            page = head + begin + "\n" + make() + "\n" + end + rest.split(end, 1)[1]
    return page


def main() -> None:
    for path in PAGES:
        path.write_text(filled(path.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()
