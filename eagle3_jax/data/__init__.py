from eagle3_jax.runs import command

command.require("train")
