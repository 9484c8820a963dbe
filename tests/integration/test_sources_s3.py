"""Sources on a real S3-compatible server.

Rules:
- an object, and all data files under a prefix, are read and digested like local files;
- what is not there is an error that names it, and a new object is seen at once.
"""

from __future__ import annotations

import pytest
import s3fs

from rlhf_core.config.data import Source
from rlhf_core.config.pipeline import PipelineConfig, StoreConfig
from rlhf_core.data.files import Row
from rlhf_core.data.sources import read_rows, source_digests
from rlhf_core.errors import DataError
from tests.support.demo_data import GENERATED


def texts(url: str, endpoint: str) -> list[str]:
    rows = read_rows(Source(path=url), StoreConfig(endpoint=endpoint))
    return [row.data["text"] for row in rows if isinstance(row, Row)]


def test_objects_and_prefixes_are_read_like_files_and_folders(s3_server) -> None:  # type: ignore[no-untyped-def]
    folder = f"{s3_server.url}/sources"
    files = s3fs.S3FileSystem(endpoint_url=s3_server.endpoint, use_listings_cache=False)
    with pytest.raises(DataError, match=r"file not found: s3://.*no such object"):
        texts(f"{folder}/a.jsonl", s3_server.endpoint)
    files.pipe(f"{folder}/a.jsonl", b'{"text": "1"}\n')
    assert texts(f"{folder}/a.jsonl", s3_server.endpoint) == ["1"]
    files.pipe(f"{folder}/sub/b.json", b'[{"text": "2"}]')
    files.pipe(f"{folder}/notes.txt", b"no data")
    assert texts(folder, s3_server.endpoint) == ["1", "2"]

    def digest() -> str:
        config = {"store": {"endpoint": s3_server.endpoint}, "data": {**GENERATED, "sft": [{"path": folder}]}}
        return source_digests(PipelineConfig.model_validate(config, strict=False))["data.sft[0]"]

    before = digest()
    assert digest() == before
    files.pipe(f"{folder}/a.jsonl", b'{"text": "3"}\n')
    assert digest() != before


def test_a_missing_bucket_is_named(s3_server) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(DataError, match="no-such-bucket"):
        texts("s3://no-such-bucket/a.jsonl", s3_server.endpoint)
    with pytest.raises(DataError, match="must be s3://bucket/key"):
        texts("s3:///a.jsonl", s3_server.endpoint)
