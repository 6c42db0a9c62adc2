"""Run the demo; exit non-zero if mmcollate gave anything else than vLLM."""

import importlib.util
import os
import sys
import traceback
from pathlib import Path

NEEDED = ("vllm", "rich", "skimage")
ROOT = Path(__file__).resolve().parents[1]
LOG = ROOT / ".cache" / "demo.log"
GIVE_UP_AFTER = 300.0


def main() -> int:
    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        print(f"the demo needs {', '.join(missing)}; vLLM has wheels for Python 3.11 to 3.13")
        return 2
    from demo import engine, story, terminal

    engine.prepare_environment()
    console = terminal.take_over_output(LOG, GIVE_UP_AFTER)
    try:
        return story.tell(console, engine.Engine)
    except KeyboardInterrupt:
        console.print("interrupted")
        return 130
    except Exception:
        terminal.show_log(console, LOG)
        console.out(traceback.format_exc())
        return 1


if __name__ == "__main__":
    code = main()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # an orderly end of the engine takes seconds
