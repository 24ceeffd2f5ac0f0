"""Models as people write them: which are captured, searched, and trained as torch trains them."""
