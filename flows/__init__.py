"""The DAG: named flows, experiment specifications and the command `ablation`."""
