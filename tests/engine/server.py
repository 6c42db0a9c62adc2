"""The OpenAI server over a model's folder, and questions to it with the ordinary client."""

import base64
import contextlib
import io
import json
import socket
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from PIL.Image import Image

from .process import check, start

MODEL = "tiny"


@contextlib.contextmanager
def serving(
    folder: Path, *, images: int, log: Path, environment: dict[str, str] | None = None
) -> Iterator[str]:
    """A server that is ready; yields the base URL of its API."""
    port = free_port()
    arguments = {
        "--model": str(folder),
        "--served-model-name": MODEL,
        "--host": "127.0.0.1",
        "--port": str(port),
        "--dtype": "bfloat16",
        "--max-model-len": "4096",
        "--max-num-seqs": "8",
        "--limit-mm-per-prompt": json.dumps({"image": images, "video": 0}),
    }
    flat = [word for argument in arguments.items() for word in argument]
    settings = {"VLLM_ENABLE_V1_MULTIPROCESSING": "1", "VLLM_LOGGING_LEVEL": "INFO"}
    settings |= environment or {}
    module = "vllm.entrypoints.openai.api_server"
    with start(module, *flat, "--enforce-eager", log=log, environment=settings) as server:
        url = f"http://127.0.0.1:{port}"
        deadline = time.monotonic() + 240
        while not is_healthy(url):
            late = time.monotonic() > deadline
            if server.poll() is not None or late:
                check(None if late else server.returncode or -1, module, log)
            time.sleep(0.5)
        yield f"{url}/v1"


def ask(url: str, images: list[Image]) -> dict[str, Any]:
    """The answer to a chat message of some images and a word."""
    from openai import OpenAI

    content: list[Any] = [
        {"type": "image_url", "image_url": {"url": data_url(image)}} for image in images
    ]
    content.append({"type": "text", "text": "hi"})
    response = OpenAI(base_url=url, api_key="none").chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": content}],
        max_tokens=4,
        temperature=0,
        logprobs=True,
        top_logprobs=5,
        extra_body={"ignore_eos": True},
    )
    answer = response.model_dump()
    return {"usage": answer["usage"], **answer["choices"][0]}


def data_url(image: Image) -> str:
    png = io.BytesIO()
    image.save(png, "PNG")
    return "data:image/png;base64," + base64.b64encode(png.getvalue()).decode()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def is_healthy(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=2) as response:
            return bool(response.status == 200)
    except (urllib.error.URLError, OSError):
        return False
