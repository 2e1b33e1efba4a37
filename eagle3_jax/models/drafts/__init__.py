"""Draft networks: EAGLE-3 and EAGLE-2 heads, MTP layers, smaller models, and block heads (DFlash, DSpark, DFlash2)."""
