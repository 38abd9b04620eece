"""Synthesis of an NPU's SystemVerilog: area, timing and power on open cells, pictures, a report."""
