"""``python -m mmcollate``."""

from mmcollate.cli import main

raise SystemExit(main())
