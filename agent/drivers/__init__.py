"""What touches the machine, each behind an interface of `base`.

base            the two interfaces: what is there (DeviceDriver), what is given out (AssignmentDriver)
host            facts from /proc, /sys and /dev
nvml            real GPUs: asks NVML in a child process
nvml_child      that process; the only importer of NVIDIA's binding
nvml_messages   what the two say to each other
checks          the checks of ``diag.nvml``, pure
fake            simulated GPUs, with faults on demand
cdi             gives devices to reservations by Container Device Interface files
cdi_spec        the format: structs, rules, versions
cdi_sources     what a GPU needs in a container: from NVIDIA's spec, or without it
"""
