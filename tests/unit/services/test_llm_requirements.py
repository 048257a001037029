"""What the LLM server's images install, and what its tests do: the same where both have it."""

from __future__ import annotations

from pathlib import Path

import pytest

PINS = Path(__file__).resolve().parents[3] / "services" / "llm" / "server" / "requirements"
READ_BUCKETS = ("aiobotocore", "botocore", "fsspec", "gcsfs", "s3fs")


def pinned(name: str) -> dict[str, str]:
    lines = (PINS / name).read_text(encoding="utf-8").splitlines()
    return dict(line.split("==") for line in lines if "==" in line)


@pytest.mark.parametrize("tests", ["tests.txt", "buckets.txt"])
def test_the_tests_have_the_versions_of_the_image(tests: str) -> None:
    image, own = pinned("cpu.txt"), pinned(tests)
    other = {name: (own[name], image[name]) for name in own.keys() & image.keys() if own[name] != image[name]}
    assert not other, "README.md next to them says how they are made"
    assert set(READ_BUCKETS) <= own.keys()


def test_both_images_read_buckets_with_the_same_versions() -> None:
    cpu, cuda = pinned("cpu.txt"), pinned("cuda.txt")
    assert {name: cpu[name] for name in READ_BUCKETS} == {name: cuda[name] for name in READ_BUCKETS}
