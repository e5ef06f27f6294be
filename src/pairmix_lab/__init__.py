"""What measures pairmix: contenders, experiments, benchmarks and their report. Needs `pip install 'pairmix[lab]'`."""
