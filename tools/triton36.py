"""Lets jax-triton 0.4 run on triton 3.6, for GPU machines that cannot have triton 3.7.

jax-triton needs one enumerator, of a TMA descriptor kind that no kernel here uses, which triton
gained in 3.7. Importing this module before anything imports jax_triton supplies it:

    python -m pytest -p tools.triton36 -m gpu
    python -c "import tools.triton36; from jaxserve.cli import main; main()" generate ...

For `bench/compare.py`, whose engines are processes of their own, give `--site jaxserve=FOLDER`; the
folder holds a `sitecustomize.py` of one line, `import tools.triton36`.
"""

import triton.backends.nvidia.driver

triton.backends.nvidia.driver.TMA_TF32 = 11
