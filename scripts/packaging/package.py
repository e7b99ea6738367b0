# For Spack: packages/py_mpistrategy/package.py of its repository of packages.  sha256: of the sdist on PyPI, once it is
# there.

from spack.package import *
from spack_repo.builtin.build_systems.cuda import CudaPackage
from spack_repo.builtin.build_systems.python import PythonPackage


class PyMpistrategy(PythonPackage, CudaPackage):
    """The tf.distribute programming model on NumPy and CuPy arrays over MPI: one MPI rank is one replica."""

    pypi = "mpistrategy/mpistrategy-1.0.0rc1.tar.gz"

    license("Apache-2.0")

    version("1.0.0rc1", sha256="0000000000000000000000000000000000000000000000000000000000000000")

    variant("bfloat16", default=False, description="Sums whose messages are bfloat16")

    depends_on("python@3.11:", type=("build", "run"))
    depends_on("py-hatchling@1.26:", type="build")
    depends_on("py-numpy@1.26:", type=("build", "run"))
    depends_on("py-mpi4py@4.0:", type=("build", "run"))  # its MPI is the job's
    depends_on("py-ml-dtypes", type=("build", "run"), when="+bfloat16")
    for arch in CudaPackage.cuda_arch_values:
        depends_on(f"py-cupy@13.4:14 +cuda cuda_arch={arch}", type=("build", "run"), when=f"+cuda cuda_arch={arch}")

    conflicts("+cuda cuda_arch=none")
