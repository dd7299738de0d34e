"""Networks for dynamics: filters in tables, energies and forces in one C++ kernel."""
