from eagle3_jax import command

command.require("train")
