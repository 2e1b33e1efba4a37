"""Draft heads that say a block of tokens in one pass: DFlash, and DSpark and DFlash2 over it."""
