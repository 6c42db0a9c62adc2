"""``python -m demo``: the real vLLM engine on a tiny model, with mmcollate on and off."""
