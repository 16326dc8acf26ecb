"""What a type checker knows of identities and roles. Checked by mypy and pyright, never run."""

from typing import assert_type

from toolbox.security import SecurityIdentity, authenticated, permit_all, roles_allowed


def roles_may_be_any_collection(names: list[str], frozen: frozenset[str]) -> None:
    for identity in (
        SecurityIdentity("ann"),
        SecurityIdentity("ann", {"support"}),
        SecurityIdentity("ann", ["support"]),
        SecurityIdentity("ann", ("support", "admin"), {"tenant": "acme"}),
        SecurityIdentity("ann", roles=names),
        SecurityIdentity("ann", roles=frozen, attributes={"tenant": 7}),
    ):
        assert_type(identity.roles, frozenset[str])


@authenticated
async def whoami(name: str) -> int:
    return 1


@roles_allowed("admin")
def audit() -> str:
    return ""


@permit_all
class Hours:
    def open(self) -> bool:
        return True


async def what_has_roles_keeps_its_type() -> None:
    assert_type(await whoami("ann"), int)
    assert_type(audit(), str)
    assert_type(Hours().open(), bool)
