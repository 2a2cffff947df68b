"""Reading datasets: samples in parts of files (`dataset`), and one module for each family of formats."""
