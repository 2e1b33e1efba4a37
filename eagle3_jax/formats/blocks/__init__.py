"""Block heads on disk: DFlash, DSpark and DFlash2, as their trainers, SGLang and vLLM have them."""
