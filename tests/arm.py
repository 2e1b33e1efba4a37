"""Kernels for CPUs, compiled for a machine that is not here: what they compute, only such a machine can show."""

from llvmlite import binding, ir


def assembly(module: ir.Module, triple: str = "aarch64-unknown-linux-gnu", cpu: str = "neoverse-n1") -> str:
    """The module as Arm's or another machine's instructions, by the passes that `kernels.cpu.compiler` runs."""
    binding.initialize_all_targets()
    binding.initialize_all_asmprinters()
    parsed = binding.parse_assembly(str(module))
    parsed.verify()
    parsed.triple = triple
    machine = binding.Target.from_triple(triple).create_target_machine(cpu=cpu, opt=3)
    passes = binding.create_pass_builder(machine, binding.create_pipeline_tuning_options(speed_level=3))
    passes.getModulePassManager().run(parsed, passes)
    return machine.emit_assembly(parsed)
