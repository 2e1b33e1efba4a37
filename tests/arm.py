"""Kernels for CPUs, compiled for a machine that is not here: what they compute, only an Arm machine can show."""

from llvmlite import binding, ir


def assembly(module: ir.Module) -> str:
    """The module as Arm instructions, by the passes that `kernels.cpu.compiler` runs."""
    binding.initialize_all_targets()
    binding.initialize_all_asmprinters()
    parsed = binding.parse_assembly(str(module))
    parsed.verify()
    parsed.triple = "aarch64-unknown-linux-gnu"
    machine = binding.Target.from_triple(parsed.triple).create_target_machine(cpu="neoverse-n1", opt=3)
    passes = binding.create_pass_builder(machine, binding.create_pipeline_tuning_options(speed_level=3))
    passes.getModulePassManager().run(parsed, passes)
    return machine.emit_assembly(parsed)
