"""Our training step against the peers': one problem file, one worker process for each side."""
