"""The same score from another evaluation harness: inspect-ai over `vlrl serve --chat`, against `vlrl eval`.

    vlrl serve configs/quickstart.yaml --chat &
    vlrl eval configs/quickstart.yaml --samples 64 -o runs/own
    python benchmarks/external_harness.py items configs/quickstart.yaml 64 runs/items.jsonl      # in vlrl's environment
    HARNESS/bin/python benchmarks/external_harness.py ask runs/items.jsonl runs/inspect.json \
        --url http://127.0.0.1:8000/v1 --key-file runs/quickstart-chat/key                        # where inspect-ai is
    python benchmarks/external_harness.py compare runs/own/answers.jsonl runs/inspect.json

`items` writes each held-out sample as messages with its target, `ask` has inspect-ai ask and score them with a scorer
that shares no code with vlrl, `compare` sets the two beside each other, answer by answer."""

from __future__ import annotations

import argparse
import json
import os
import re
from pathlib import Path
from typing import Any


def items(config: str, n: int, out: Path, words: list[str]) -> None:
    """Writes the first `n` held-out samples: id, messages in OpenAI's form, target box in pixels, size of the image."""
    from vlrl.config import load
    from vlrl.task.interface import first_samples
    from vlrl.tools.clients.chat_prompts import ChatEncoder
    from vlrl.training.build_task import make_task

    loaded = load(config, words)
    task, encode, lines = make_task(loaded), ChatEncoder(loaded), []
    for sample in first_samples(task, "heldout", n):
        prompt = encode(task, sample)
        lines.append({"id": sample.id, "messages": prompt.mm["messages"], "target": task.target(sample),
                      "size": list(prompt.media[0].size)})
    out.write_text("".join(json.dumps(line) + "\n" for line in lines))
    print(f"{len(lines)} items in {out}")


def overlap(text: str, target: list[float], size: list[int]) -> float:
    """IoU of the last four numbers of a text, in thousandths of the image, and the target; 0 without four numbers."""
    found = re.findall(r"-?\d+(?:\.\d+)?", text)[-4:]
    if len(found) < 4:
        return 0.0
    x1, y1, x2, y2 = (float(v) / 1000 * side for v, side in zip(found, (*size, *size), strict=True))
    if x2 <= x1 or y2 <= y1:
        return 0.0
    a, b, c, d = target
    both = max(0.0, min(x2, c) - max(x1, a)) * max(0.0, min(y2, d) - max(y1, b))
    return both / ((x2 - x1) * (y2 - y1) + (c - a) * (d - b) - both)


def ask(source: Path, out: Path, url: str, key: str, tokens: int) -> None:
    """Has inspect-ai ask the endpoint and score the answers."""
    from inspect_ai import Task  # pyright: ignore[reportMissingImports]
    from inspect_ai import eval as run  # pyright: ignore[reportMissingImports]
    from inspect_ai.dataset import Sample  # pyright: ignore[reportMissingImports]
    from inspect_ai.model import (  # pyright: ignore[reportMissingImports]
        ChatMessageAssistant,
        ChatMessageSystem,
        ChatMessageUser,
        ContentImage,
        ContentText,
        GenerateConfig,
        get_model,
    )
    from inspect_ai.scorer import Score, mean, scorer  # pyright: ignore[reportMissingImports]
    from inspect_ai.solver import generate  # pyright: ignore[reportMissingImports]

    kinds: dict[str, Any] = {"user": ChatMessageUser, "system": ChatMessageSystem, "assistant": ChatMessageAssistant}

    def message(one: dict[str, Any]) -> Any:
        content = one["content"]
        return kinds[one["role"]](content=content if isinstance(content, str) else [
            ContentText(text=p["text"]) if p["type"] == "text" else ContentImage(image=p["image_url"]["url"])
            for p in content])

    lines = [json.loads(line) for line in source.read_text().splitlines()]
    by_id = {line["id"]: line for line in lines}

    @scorer(metrics=[mean()])
    def iou() -> Any:
        async def score(state: Any, target: Any) -> Score:
            line = by_id[state.sample_id]
            return Score(value=overlap(state.output.completion, line["target"], line["size"]),
                         answer=state.output.completion)
        return score

    os.environ.update({"VLRL_API_KEY": key, "VLRL_BASE_URL": url})
    model = get_model("openai-api/vlrl/model", config=GenerateConfig(temperature=0.0, max_tokens=tokens))
    (log,) = run(Task(dataset=[Sample(id=line["id"], input=[*map(message, line["messages"])],
                                      target=json.dumps(line["target"])) for line in lines],
                      solver=generate(), scorer=iou()),
                 model=model, display="none", log_dir=str(out.parent / "inspect"), max_connections=1)
    if log.status != "success" or not log.samples:
        raise SystemExit(f"inspect-ai ended with {log.status}: {log.error}")
    found = {str(s.id): {"answer": s.output.completion, "iou": float(s.scores["iou"].value)} for s in log.samples}
    out.write_text(json.dumps({"mean": log.results.scores[0].metrics["mean"].value, "samples": found}, indent=1))
    print(f"{len(found)} answers in {out}")


def compare(own: Path, other: Path) -> dict[str, float]:
    """Returns both means, and how many answers and scores are equal."""
    rows = [json.loads(line) for line in own.read_text().splitlines()]
    mine = {row["sample"]: row for row in rows if "answer" in row}
    theirs = json.loads(other.read_text())
    both = mine.keys() & theirs["samples"].keys()
    pairs = [({"iou": mine[i]["metrics"].get("iou", mine[i]["parts"].get("iou")), "answer": mine[i]["answer"]},
              theirs["samples"][i]) for i in sorted(both)]
    found = {"n": len(pairs), "vlrl": sum(a["iou"] for a, _ in pairs) / len(pairs), "inspect": theirs["mean"],
             "equal_answers": sum(a["answer"] == b["answer"] for a, b in pairs),
             "largest_difference": max(abs(a["iou"] - b["iou"]) for a, b in pairs)}
    print(json.dumps(found))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True)
    first = commands.add_parser("items")
    first.add_argument("config")
    first.add_argument("n", type=int)
    first.add_argument("out", type=Path)
    first.add_argument("words", nargs="*")
    second = commands.add_parser("ask")
    second.add_argument("items", type=Path)
    second.add_argument("out", type=Path)
    second.add_argument("--url", required=True)
    second.add_argument("--key-file", type=Path, required=True)
    second.add_argument("--max-tokens", type=int, default=24)
    third = commands.add_parser("compare")
    third.add_argument("own", type=Path)
    third.add_argument("other", type=Path)
    given = parser.parse_args()
    if given.command == "items":
        items(given.config, given.n, given.out, given.words)
    elif given.command == "ask":
        ask(given.items, given.out, given.url, given.key_file.read_text().strip(), given.max_tokens)
    else:
        compare(given.own, given.other)


if __name__ == "__main__":
    main()
