"""Cities and their countries: statements of our own to measure detectors on.

Each city has one true statement and one false one, which names the country of another city, so that
cities and countries by themselves tell nothing.

    python benchmarks/cities.py > cities.csv
"""

import argparse
import csv
import random
import sys

TABLE = """
France: Lyon, Marseille, Toulouse, Bordeaux, Nantes, Strasbourg, Lille, Nice, Rennes, Dijon
Germany: Hamburg, Munich, Cologne, Frankfurt, Stuttgart, Leipzig, Dresden, Hanover, Bremen
Italy: Milan, Naples, Turin, Palermo, Genoa, Bologna, Florence, Venice, Verona, Bari
Spain: Barcelona, Valencia, Seville, Zaragoza, Malaga, Bilbao, Granada, Alicante
Portugal: Porto, Braga, Coimbra, Faro
Poland: Krakow, Gdansk, Wroclaw, Poznan, Lodz, Lublin
Sweden: Gothenburg, Malmo, Uppsala
Norway: Bergen, Trondheim, Stavanger, Tromso
Finland: Tampere, Turku, Oulu, Espoo
Denmark: Aarhus, Odense, Aalborg
the Netherlands: Rotterdam, Utrecht, Eindhoven, Groningen, Maastricht
Belgium: Antwerp, Ghent, Bruges, Liege
Austria: Graz, Salzburg, Innsbruck, Linz
Switzerland: Zurich, Geneva, Basel, Lausanne, Lucerne
Greece: Thessaloniki, Patras, Heraklion
Russia: Novosibirsk, Vladivostok, Kazan, Omsk, Samara, Irkutsk, Murmansk
Ukraine: Odessa, Lviv, Kharkiv, Dnipro
Turkey: Istanbul, Izmir, Bursa, Antalya, Konya
Ireland: Cork, Galway, Limerick
the United Kingdom: Manchester, Liverpool, Leeds, Glasgow, Bristol, Sheffield, Cardiff, Belfast
the United States: Chicago, Houston, Boston, Seattle, Denver, Dallas, Detroit, Miami, Phoenix
Canada: Toronto, Montreal, Vancouver, Calgary, Edmonton, Winnipeg, Halifax
Mexico: Guadalajara, Monterrey, Puebla, Tijuana, Cancun, Acapulco
Brazil: Salvador, Recife, Fortaleza, Manaus, Curitiba, Belo Horizonte, Porto Alegre
Argentina: Rosario, Mendoza, Cordoba, La Plata
Chile: Valparaiso, Antofagasta, Temuco
Colombia: Medellin, Cali, Cartagena, Barranquilla
Peru: Cusco, Arequipa, Trujillo, Iquitos
Venezuela: Maracaibo, Barquisimeto
Ecuador: Guayaquil, Cuenca
Cuba: Santiago de Cuba, Camaguey
Egypt: Alexandria, Luxor, Aswan, Port Said
Morocco: Casablanca, Marrakesh, Fez, Tangier
Algeria: Oran, Constantine
Nigeria: Lagos, Kano, Ibadan, Port Harcourt
Ghana: Kumasi, Tamale
Kenya: Mombasa, Kisumu
Tanzania: Dar es Salaam, Arusha
South Africa: Johannesburg, Durban, Soweto, Port Elizabeth
Ethiopia: Gondar, Dire Dawa
Israel: Haifa, Tel Aviv, Eilat
Iran: Isfahan, Shiraz, Tabriz, Mashhad
Iraq: Basra, Mosul, Erbil
Saudi Arabia: Jeddah, Mecca, Medina
Syria: Aleppo, Homs
Pakistan: Karachi, Lahore, Peshawar, Multan
India: Mumbai, Chennai, Kolkata, Bangalore, Hyderabad, Pune, Jaipur, Lucknow
Bangladesh: Chittagong, Sylhet
Sri Lanka: Kandy, Galle
China: Shanghai, Guangzhou, Shenzhen, Chengdu, Wuhan, Nanjing, Harbin, Tianjin
Japan: Osaka, Kyoto, Nagoya, Sapporo, Fukuoka, Hiroshima, Nagasaki, Kobe, Sendai
South Korea: Busan, Incheon, Daegu, Gwangju
Vietnam: Da Nang, Haiphong, Hue
Thailand: Chiang Mai, Phuket, Pattaya
Indonesia: Surabaya, Bandung, Medan, Semarang
the Philippines: Cebu, Davao, Quezon City
Malaysia: Penang, Ipoh, Malacca
Myanmar: Mandalay, Yangon
Australia: Sydney, Melbourne, Brisbane, Perth, Adelaide, Darwin, Hobart
New Zealand: Auckland, Christchurch, Dunedin, Hamilton
"""


def records(seed: int = 0) -> list[dict[str, str]]:
    """Return the statements with their labels and cities, as a CSV file would have them."""
    known = []
    for line in TABLE.strip().splitlines():
        country, cities = line.split(": ")
        known += [(city, country) for city in cities.split(", ")]
    draw, result = random.Random(seed), []
    for city, country in known:
        other = draw.choice([c for _, c in known if c != country])
        for label, named in (("1", country), ("0", other)):
            text = f"The city of {city} is in {named}."
            result.append({"statement": text, "label": label, "city": city})
    return result


if __name__ == "__main__":
    argparse.ArgumentParser(description="Print the statements as CSV.").parse_args()
    out = csv.DictWriter(sys.stdout, ["statement", "label", "city"])
    out.writeheader()
    out.writerows(records())
