"""The Python interface: any module, any loss, any map-style dataset, under every data plan."""
