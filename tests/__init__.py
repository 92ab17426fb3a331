from tests import checker as checker  # jaxtyping's hook imports the top package alone
