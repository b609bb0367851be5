"""Whether vectors do their job: detectors, held-out rows, what safety costs."""
