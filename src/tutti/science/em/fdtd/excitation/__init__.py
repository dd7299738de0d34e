"""Sources, plane waves, ports and waveforms."""
