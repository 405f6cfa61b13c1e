"""The simulator, calibration and replay: the production cores without processes, clocks or a model."""
