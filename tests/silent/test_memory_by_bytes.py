"""Memory that rows with pictures inside take: by the size of one row, and not by how many rows there are."""

from __future__ import annotations

import base64
import io
import json
import re
import tarfile
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from vlrl.config import load_config
from vlrl.data import read_samples
from vlrl.data.sources.row_index import open_records
from vlrl.tools.datasets.check import check
from vlrl.tools.datasets.convert import convert
from vlrl.training.build_task import make_task

ROWS, SIDE = 100, 300
"""About .27 MB a picture, 27 MB in all."""


@pytest.fixture(scope="module")
def pictures() -> list[bytes]:
    rng, made = np.random.default_rng(0), []
    for _ in range(ROWS):
        file = io.BytesIO()
        Image.fromarray(rng.integers(0, 256, (SIDE, SIDE, 3), np.uint8)).save(file, "png", compress_level=0)
        made.append(file.getvalue())
    return made


@pytest.fixture(scope="module")
def parquet(pictures: list[bytes], tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("parquet") / "rows.parquet"
    rows = [{"id": n, "image": {"bytes": data, "path": None}, "question": "Is it noise?", "answer": "yes",
             "answer_type": "yes_no"} for n, data in enumerate(pictures)]
    pq.write_table(pa.Table.from_pylist(rows), path, write_batch_size=2)
    return path


def peak(work: Callable[[], Any]) -> tuple[int, Any]:
    """Bytes of Python and of arrow at the worst moment of a piece of work, and what it returns."""
    before, pool = pa.default_memory_pool(), pa.proxy_memory_pool(pa.default_memory_pool())
    pa.set_memory_pool(pool)
    tracemalloc.start()
    try:
        done = work()
        return tracemalloc.get_traced_memory()[1] + (pool.max_memory() or 0), done
    finally:
        tracemalloc.stop()
        pa.set_memory_pool(before)


def samples(path: Path, cache: Path, *settings: str) -> Any:
    config = load_config("configs/qa/tiny.yaml", f"data.train={path}", f"data.cache={cache}", *settings)
    return read_samples(make_task(config), "train")


def test_a_table_is_unpacked_converted_and_checked_in_small_pieces(parquet: Path, tmp_path: Path):
    used, rows = peak(lambda: open_records([parquet], tmp_path))
    assert len(rows) == ROWS and used < 16e6, used
    used, read = peak(lambda: samples(parquet, tmp_path, "data.index=memory"))
    assert len(read) == ROWS and used < 20e6, used
    used, (count, bad) = peak(lambda: convert(parquet, tmp_path / "new.jsonl"))
    assert (count, bad) == (ROWS, []) and used < 20e6, used
    assert len(list((tmp_path / "new_media").iterdir())) == ROWS
    config = load_config("configs/qa/tiny.yaml")
    used, findings = peak(lambda: check(parquet, make_task(config), config.limits, media=False))
    assert findings.rows == ROWS and used < 20e6, used
    page = Path("docs/data.md").read_text()
    assert not re.search(r"groups of about 1000 rows are best", page) and "row_group_size" in page


def test_lines_of_base64_and_a_shard(pictures: list[bytes], tmp_path: Path) -> None:
    asked = {"question": "Is it noise?", "answer": "yes", "answer_type": "yes_no"}
    lines, shard = tmp_path / "rows.jsonl", tmp_path / "rows.tar"
    lines.write_text("".join(json.dumps({"id": n, "image": base64.b64encode(data).decode(), **asked}) + "\n"
                             for n, data in enumerate(pictures)))
    with tarfile.open(shard, "w") as tar:
        for n, data in enumerate(pictures):
            for name, content in ((f"{n}.png", data), (f"{n}.json", json.dumps(asked).encode())):
                info = tarfile.TarInfo(name)
                info.size = len(content)
                tar.addfile(info, io.BytesIO(content))
    for path in (lines, shard):
        used, read = peak(lambda path=path: samples(path, tmp_path, "data.index=memory"))
        assert len(read) == ROWS and used < 20e6, (path.name, used)
